"""LoRA on vLLM's CPU platform, as one matrix product per adapter over all its rows in a batch.

vLLM 0.32 copies the adapter of every token before it multiplies, one matrix per token: hundreds of megabytes per layer
for a few thousand prompt tokens. And for tokens without an adapter it uses the last adapter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform

SlotRows = list[tuple[int, slice | Tensor]]
"""Slots of adapters with the rows that use them."""


class GroupedAdapters(PunicaWrapperCPU):
    """Adds the adapters' output to a layer's output, and leaves rows without an adapter unchanged."""

    _tokens: SlotRows
    _sampled: SlotRows

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Groups a batch's rows by adapter; vLLM calls this before each batch."""
        super().update_metadata(*args, **kwargs)
        self._tokens, self._sampled = group_rows(self.token_lora_indices), group_rows(self.sampler_indices)

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        """Adds to a linear layer's output, in place.

        Args:
            y: `[N, out]`. It may be the outputs of several layers packed side by side.
            x: `[N, in]`.
            lora_a_stacked: per packed layer, `[slots, 1, rank, in]`.
            lora_b_stacked: per packed layer, `[slots, 1, width, rank]`.
            scale: factor of the added output.
            output_slices: the packed layers' widths.
            **kwargs: vLLM's arguments for other platforms.
        """
        x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        start = 0
        for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            add_lora_product(y[:, start : start + width], x, a, b, scale, self._tokens)
            start += width

    def add_lora_logits(
        self, y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, scale: float, **kwargs: Any
    ) -> None:
        """Adds to the logits `[N, vocabulary]`, in place; see `add_lora_linear`."""
        add_lora_product(
            y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), lora_a_stacked, lora_b_stacked, scale, self._sampled
        )


def group_rows(slots: Tensor) -> SlotRows:
    """Groups rows by slot. Slot -1 means no adapter.

    Args:
        slots: int `[N]`, the slot of each row.
    """
    used_slots = slots.unique().tolist()
    if len(used_slots) == 1:
        return [(slot, slice(None)) for slot in used_slots if slot >= 0]
    return [(slot, (slots == slot).nonzero().squeeze(1)) for slot in used_slots if slot >= 0]


def add_lora_product(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, slot_rows: SlotRows) -> None:
    """Computes y[rows] += scale * x[rows] A^T B^T for every slot; shapes as in `add_lora_linear`.

    vLLM pads vocabularies, so the logits may be wider or narrower than B.
    """
    width = min(y.shape[1], b.shape[2])
    for slot, rows in slot_rows:
        low_rank = torch.nn.functional.linear(x[rows].to(a.dtype), a[slot, 0])
        y[rows, :width] += scale * torch.nn.functional.linear(low_rank, b[slot, 0, :width]).to(y.dtype)


def install() -> None:
    """Makes CPU engines of this process use `GroupedAdapters`. Does nothing on other platforms."""
    if current_platform.is_cpu():
        type(current_platform).get_punica_wrapper = classmethod(
            lambda cls: f"{GroupedAdapters.__module__}.{GroupedAdapters.__qualname__}"
        )
