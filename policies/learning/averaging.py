"""LLMs that started from one base move to the mean of their weights.

Model soups (arXiv 2203.05482) average once, at the end; WARP (arXiv 2406.16768) again and again, part of the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def mean(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> Tensor:
    """Returns the mean, a new tensor; the order of the tensors decides its last bit.

    Args:
        tensors: those of this process.
        group: processes that have as many each, all of which count; None: this one alone.
    """
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    if group is None:
        return total / len(tensors)
    dist.all_reduce(total, group=group)
    return total / (len(tensors) * dist.get_world_size(group))


@torch.no_grad()
def means(
    llms: Sequence[Sequence[Tensor]], group: dist.ProcessGroup | None = None
) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
    """Yields each tensor of all LLMs of this process, and its mean, one by one; all of a group must ask alike."""
    for tensors in zip(*llms, strict=True):
        yield tensors, mean(tensors, group)


@torch.no_grad()
def move_to_mean(llms: Sequence[Sequence[Tensor]], share: float, group: dist.ProcessGroup | None = None) -> None:
    """Moves the weights of all LLMs towards their mean, in place, one tensor at a time.

    Args:
        llms: the tensors of each, in one order.
        share: of the way; with 1 all are equal afterwards.
        group: processes that have LLMs too; None: this one alone.
    """
    for tensors, middle in means(llms, group):
        for tensor in tensors:
            tensor.lerp_(middle, share)
