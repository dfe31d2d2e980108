"""Rows of padded token tensors, and how they are dealt into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from policies.models.language_model import left_padded


class Rows(TypedDict):
    """Rows of one LLM. `B` responses, `P` prompt tokens (padded on the left), `R` response tokens (on the right)."""

    prompts: Tensor
    """int64 `[B, P]`."""
    prompt_mask: Tensor
    """int64 `[B, P]`, 0 on padding."""
    responses: Tensor
    """int64 `[B, R]`."""
    mask: Tensor
    """fp32 `[B, R]`, 1 on response tokens."""
    sampler_logprobs: Tensor
    """fp32 `[B, R]`, as the generation backend reported them."""
    rewards: Tensor
    """fp32 `[B]`, what the agent trains on, before score scaling."""
    task_rewards: Tensor
    """fp32 `[B]`, the response's own raw reward."""
    ended: Tensor
    """fp32 `[B]`, 1 where the response ends with the end-of-sequence token, 0 where its length was cut."""
    queries: Tensor
    """int64 `[B]`, the query's index in its split."""


def make_rows(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    rewards: Sequence[float],
    task_rewards: Sequence[float],
    ended: Sequence[bool],
    queries: Sequence[int] | None = None,
) -> Rows:
    """Pads ragged lists into tensors, prompts on the left and responses on the right; default: no query comes twice."""
    prompt_tokens, prompt_mask = left_padded(prompts)
    width = max(len(response) for response in responses)
    tokens = np.zeros((len(responses), width), dtype=np.int64)
    mask = np.zeros(tokens.shape, dtype=np.float32)
    sampled = np.zeros(tokens.shape, dtype=np.float32)
    for row, (response, logprob) in enumerate(zip(responses, logprobs, strict=True)):
        tokens[row, : len(response)] = response
        sampled[row, : len(response)] = logprob
        mask[row, : len(response)] = 1.0
    return Rows(
        prompts=prompt_tokens,
        prompt_mask=prompt_mask,
        responses=torch.from_numpy(tokens),
        mask=torch.from_numpy(mask),
        sampler_logprobs=torch.from_numpy(sampled),
        rewards=torch.as_tensor(rewards, dtype=torch.float32),
        task_rewards=torch.as_tensor(task_rewards, dtype=torch.float32),
        ended=torch.as_tensor(ended, dtype=torch.float32),
        queries=torch.as_tensor(range(len(responses)) if queries is None else queries, dtype=torch.int64),
    )


def take(rows: dict[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    """The chosen rows of every column."""
    return {name: column[index] for name, column in rows.items()}


def by_length(rows: dict[str, Tensor]) -> Tensor:
    """The places of the rows, shortest prompts first, of equals the shortest responses; int64 `[B]`."""
    prompt_lengths, response_lengths = rows["prompt_mask"].sum(1), rows["mask"].sum(1)
    order = np.lexsort((response_lengths.cpu().numpy(), prompt_lengths.cpu().numpy()))
    return torch.from_numpy(order).to(prompt_lengths.device)


def micro_batches(rows: dict[str, Tensor], size: int) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Splits rows into micro-batches of similar length, each trimmed to its longest prompt and response.

    Args:
        rows: columns of `Rows` and any other `[B]` or `[B, R]` columns.
        size: most rows per micro-batch.

    Yields:
        `(index, columns)`: the rows' places in `rows`, and their trimmed columns.
    """
    prompt_lengths, response_lengths = rows["prompt_mask"].sum(1), rows["mask"].sum(1).long()
    for index in by_length(rows).split(size):
        prompt, response = int(prompt_lengths[index].max()), int(response_lengths[index].max())
        yield (
            index,
            {
                name: column[index, -prompt:]
                if name.startswith("prompt")
                else column[index, :response]
                if column.dim() > 1
                else column[index]
                for name, column in rows.items()
            },
        )
