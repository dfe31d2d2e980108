"""Adapters on vLLM's CPU platform, as matrix products over all rows of a batch that share an adapter.

vLLM 0.32 copies every token's adapter out of the stack before it multiplies, a matrix per token: hundreds of megabytes
per layer for a few thousand prompt tokens. And what it copies for a token without an adapter is the last one's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform

Groups = list[tuple[int, slice | Tensor]]
"""Slots of adapters, each with its rows."""


class GroupedAdapters(PunicaWrapperCPU):
    """Adds the adapters' share to what a layer has computed; rows without an adapter stay as they are."""

    _tokens: Groups
    _sampled: Groups

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Learns, before a batch, which row has which adapter."""
        super().update_metadata(*args, **kwargs)
        self._tokens, self._sampled = groups(self.token_lora_indices), groups(self.sampler_indices)

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
            y: `[N, out]`, which may be several layers packed side by side.
            x: `[N, in]`.
            lora_a_stacked: per packed layer, `[slots, 1, rank, in]`.
            lora_b_stacked: per packed layer, `[slots, 1, width, rank]`.
            scale: of what is added.
            output_slices: the widths.
            **kwargs: vLLM's, for other platforms.
        """
        x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        start = 0
        for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            add(y[:, start : start + width], x, a, b, scale, self._tokens)
            start += width

    def add_lora_logits(
        self, y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, scale: float, **kwargs: Any
    ) -> None:
        """Adds to the logits `[N, vocabulary]`, in place; see `add_lora_linear`."""
        add(y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), lora_a_stacked, lora_b_stacked, scale, self._sampled)


def groups(slots: Tensor) -> Groups:
    """Puts rows of the same slot together; slot -1 stands for no adapter.

    Args:
        slots: int `[N]`.
    """
    found = slots.unique().tolist()
    if len(found) == 1:
        return [(slot, slice(None)) for slot in found if slot >= 0]
    return [(slot, (slots == slot).nonzero().squeeze(1)) for slot in found if slot >= 0]


def add(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, rows_of: Groups) -> None:
    """y[rows] += scale * x[rows] A^T B^T for every slot; shapes as in `add_lora_linear`.

    vLLM pads vocabularies, so that the logits may be wider than B, or narrower.
    """
    width = min(y.shape[1], b.shape[2])
    for slot, rows in rows_of:
        narrow = torch.nn.functional.linear(x[rows].to(a.dtype), a[slot, 0])
        y[rows, :width] += scale * torch.nn.functional.linear(narrow, b[slot, 0, :width]).to(y.dtype)


def use() -> None:
    """Makes engines that this process starts on a CPU compute adapters in this way; does nothing on other platforms."""
    if current_platform.is_cpu():
        type(current_platform).get_punica_wrapper = classmethod(
            lambda cls: f"{GroupedAdapters.__module__}.{GroupedAdapters.__qualname__}"
        )
