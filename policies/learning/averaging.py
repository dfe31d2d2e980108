"""LLMs that started from one base move to the mean of their weights.

Model soups (arXiv 2203.05482) average once, at the end; WARP (arXiv 2406.16768) again and again, part of the way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def mean(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the mean, a new tensor; the order of the tensors decides its last bit."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total / len(tensors)


@torch.no_grad()
def move_to_mean(llms: Sequence[Sequence[Tensor]], share: float) -> None:
    """Moves the weights of all LLMs towards their mean, in place, one tensor at a time.

    Args:
        llms: the tensors of each, in one order.
        share: of the way; with 1 all are equal afterwards.
    """
    for tensors in zip(*llms, strict=True):
        middle = mean(tensors)
        for tensor in tensors:
            tensor.lerp_(middle, share)
