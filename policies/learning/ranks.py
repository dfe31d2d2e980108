"""Collective operations of learner processes: sharing the rows of one policy, and averaging several policies' weights.

Policies that started from one base can be averaged: model soups (arXiv 2203.05482) average the weights once, after
training; WARP (arXiv 2406.16768) moves them part of the way to their mean again and again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Ranks:
    """The processes that train one policy: each forwards a part of the packs, and results are summed over all."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Wraps a process group; None: this process alone."""
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.count = 1 if group is None else dist.get_world_size(group)

    def sum(self, x: Tensor) -> Tensor:
        """All-reduces a tensor in place, and returns it."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sums gradients over all ranks by one flat all-reduce; a rank without rows adds zeros."""
        if self.group is None:
            return
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = self.sum(torch.cat([grad.reshape(-1) for grad in grads]))
        for parameter, grad in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = grad.view_as(parameter).clone()

    def broadcast(self, parameters: Sequence[nn.Parameter]) -> None:
        """Copies the weights of rank 0 to all ranks."""
        for parameter in parameters if self.group is not None else ():
            dist.broadcast(parameter.data, group=self.group, group_src=0)


@torch.no_grad()
def mean_tensors(
    policies: Sequence[Sequence[Tensor]], group: dist.ProcessGroup | None = None
) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
    """Yields each weight of all policies of this process together with its mean, whose last bit depends on their order.

    Args:
        group: processes with equally many policies each, included in the mean; all of them must iterate. None: this
            process alone.
    """
    for tensors in zip(*policies, strict=True):
        total, count = tensors[0].clone(), len(tensors)
        for tensor in tensors[1:]:
            total += tensor
        if group is not None:
            dist.all_reduce(total, group=group)
            count *= dist.get_world_size(group)
        yield tensors, total / count


@torch.no_grad()
def move_to_mean(policies: Sequence[Sequence[Tensor]], tau: float, group: dist.ProcessGroup | None = None) -> None:
    """Moves the weights of all policies towards their mean, in place, one tensor at a time: w ← w + τ · (mean - w).

    Args:
        tau: τ; with 1 all policies are equal afterwards.
        group: processes that have other policies; None: this process alone.
    """
    for tensors, mean in mean_tensors(policies, group):
        for tensor in tensors:
            tensor.lerp_(mean, tau)
