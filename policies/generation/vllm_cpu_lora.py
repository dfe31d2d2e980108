"""LoRA on vLLM's CPU platform, as two matrix products per layer for all adapters of a batch.

vLLM 0.32 copies the adapter of every token before it multiplies, one matrix per token: hundreds of megabytes per layer
for a few thousand prompt tokens. And for tokens without an adapter it uses the last adapter.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import linear
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform

SlotRows = list[tuple[int, slice | Tensor]]
"""Slots of adapters with the rows that use them."""


class GroupedAdapters(PunicaWrapperCPU):
    """Adds the adapters' output to a layer's output, and leaves rows without an adapter unchanged."""

    weights_version: ClassVar[int] = 0
    """Incremented whenever an adapter of an engine in this process changes (`discard_packed`)."""
    _sampled: SlotRows
    _slots: tuple[int, ...] = ()
    """The slots that the batch uses, in ascending order, without -1, which means no adapter."""
    _mask: Tensor | None = None
    """bool `[N, slots]`: whether a row uses a slot; None if all rows use the same."""
    _packed: dict[int, tuple[Tensor, Tensor]]
    """Per layer, the adapters in `_slots` side by side; see `pack_adapters`."""
    _packed_version: tuple[int, tuple[int, ...]] | None = None
    """The weights' version and the slots in `_packed`."""

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Groups a batch's rows by adapter; vLLM calls this before each batch whose rows differ from the last one's."""
        super().update_metadata(*args, **kwargs)
        self._sampled = group_rows(self.sampler_indices)
        rows = self.token_lora_indices
        used = rows.unique()
        self._mask = None if len(used) == 1 else rows[:, None] == used[used >= 0]
        self._slots = tuple(used[used >= 0].tolist())

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
        """
        if not self._slots:
            return
        if self._packed_version != (version := (self.weights_version, self._slots)):
            self._packed, self._packed_version = {}, version
        key = lora_a_stacked[0].data_ptr()
        if key not in self._packed:
            self._packed[key] = pack_adapters(lora_a_stacked, lora_b_stacked, self._slots)
        a, b = self._packed[key]
        low_rank = linear(x.view(-1, x.shape[-1]), a)
        if self._mask is not None:
            low_rank.view(len(low_rank), len(self._slots), -1).mul_(self._mask[:, :, None])
        y.view(-1, y.shape[-1]).addmm_(low_rank, b, alpha=scale)

    def add_lora_logits(
        self, y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, scale: float, **kwargs: Any
    ) -> None:
        """Adds to the logits `[N, vocabulary]`, in place; see `add_lora_linear`."""
        add_lora_product(
            y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), lora_a_stacked, lora_b_stacked, scale, self._sampled
        )


def pack_adapters(
    lora_a_stacked: tuple[Tensor, ...], lora_b_stacked: tuple[Tensor, ...], slots: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Puts a layer's adapters side by side, so that two matrix products compute them all.

    Args:
        lora_a_stacked, lora_b_stacked: as in `GroupedAdapters.add_lora_linear`.

    Returns:
        A `[slots * packed layers * rank, in]`, and B `[slots * packed layers * rank, out]`, in which each packed
        layer's columns are 0 outside its own rows.
    """
    a = torch.cat([layer[slot, 0] for slot in slots for layer in lora_a_stacked])
    b = torch.cat([torch.block_diag(*(layer[slot, 0].t() for layer in lora_b_stacked)) for slot in slots])
    return a, b


def discard_packed() -> None:
    """Makes the engines of this process pack their adapters again. To be called after an adapter's weights changed."""
    GroupedAdapters.weights_version += 1


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
        low_rank = linear(x[rows].to(a.dtype), a[slot, 0])
        y[rows, :width] += scale * linear(low_rank, b[slot, 0, :width]).to(y.dtype)


def install() -> None:
    """Makes CPU engines of this process use `GroupedAdapters`. Does nothing on other platforms."""
    if current_platform.is_cpu():
        type(current_platform).get_punica_wrapper = classmethod(
            lambda cls: f"{GroupedAdapters.__module__}.{GroupedAdapters.__qualname__}"
        )
