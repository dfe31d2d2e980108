"""The processes that learn one LLM together: each forwards a part of the rows, and all sum up what they find."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from policies.learning.rows import Rows, by_length


class Ranks:
    """A process group, or this process alone."""

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
