"""Batches of which a test needs only some columns."""

from __future__ import annotations

import torch
from torch import Tensor

from policies.learning.rows import TrainRows


def make_batch(**columns: Tensor) -> TrainRows:
    """A batch with these columns; the others are 0, but responses have no padding, and optional columns are absent."""
    by_token = columns.get("mask", next((column for column in columns.values() if column.dim() == 2), None))
    first = next(iter(columns.values()))
    zeros = torch.zeros(len(first), 1) if by_token is None else torch.zeros(by_token.shape)
    tokens, indices = zeros.long(), zeros[:, 0].long()
    defaults = {
        "prompts": tokens,
        "prompt_mask": tokens,
        "responses": tokens,
        "mask": torch.ones_like(zeros),
        "sampler_logprobs": zeros,
        "task_rewards": zeros[:, 0].double(),
        "ended": zeros[:, 0],
        "groups": indices,
        "chains": indices,
        "positions": indices,
        "logprobs": zeros,
        "entropy": zeros,
        "rewards": zeros[:, 0],
        "kl": zeros,
        "advantages": zeros,
    }
    return TrainRows(**(defaults | columns))
