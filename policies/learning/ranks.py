"""What learning processes do together: those of one LLM share its rows, those of several move to their mean.

LLMs that started from one base may move to the mean of their weights: model soups (arXiv 2203.05482) average once, at
the end; WARP (arXiv 2406.16768) again and again, part of the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from policies.learning.rows import Rows, by_length


class Ranks:
    """The processes that learn one LLM: each forwards a part of the rows, and all sum up what they find."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Takes the group; None: there is no other process."""
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.count = 1 if group is None else dist.get_world_size(group)

    def shares(self, rows: Rows) -> list[Tensor]:
        """The places of the rows that each rank forwards: every n-th of all, sorted by length."""
        order = by_length(rows)
        return [order[rank :: self.count] for rank in range(self.count)]

    def sum(self, x: Tensor) -> Tensor:
        """Adds a tensor over all ranks, in place, and returns it."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Adds gradients by one flat all-reduce; a rank without rows adds zeros."""
        if self.group is None:
            return
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = self.sum(torch.cat([grad.reshape(-1) for grad in grads]))
        for parameter, grad in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = grad.view_as(parameter).clone()

    def broadcast(self, parameters: Sequence[nn.Parameter]) -> None:
        """Gives all ranks the first one's weights."""
        for parameter in parameters if self.group is not None else ():
            dist.broadcast(parameter.data, group=self.group, group_src=0)


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
