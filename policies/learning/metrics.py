"""What is reported of an LLM's responses, from their scored rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from policies.learning import token_ppo
from policies.learning.rows import Rows

RESPONSE_METRICS = ("task_reward", "kl", "combined_reward", "response_length", "eos_rate", "repetition")
"""What is measured of each response, in training and in evaluations."""


def measure_responses(rows: Rows, eval_kl_coef: float) -> dict[str, Tensor]:
    """What is reported of each response of one LLM.

    Args:
        rows: as played and scored.
        eval_kl_coef: weight of the KL in the combined reward (paper §5: own task reward - eta * summed KL).

    Returns:
        fp32 `[B]` each: `task_reward`, `kl` (nats, summed over the response), `combined_reward`, `response_length`
        (tokens), `eos_rate` (1 where it ends by itself), `repetition`.
    """
    kl, task_reward = rows["full_kl"].sum(1), rows["task_rewards"].float()
    return {
        "task_reward": task_reward,
        "kl": kl,
        "combined_reward": task_reward - eval_kl_coef * kl,
        "response_length": rows["mask"].sum(1),
        "eos_rate": rows["ended"],
        "repetition": repetition(rows["responses"], rows["mask"]),
    }


def measure(rows: Rows, eval_kl_coef: float) -> dict[str, float]:
    """What is reported of one LLM's scored rows; for the arguments see `measure_responses`.

    Returns:
        The means over responses of what `measure_responses` gives; means over tokens of `entropy`, of
        `logprob_diff_mean` (|sampler - learner| log-probability), and `logprob_diff_max`, its largest, and of
        `importance_sampling_ratio` (learner's / sampler's probability, before it is capped); the deviation
        `task_reward_std`; of rows
        whose `returns` are estimated, `explained_variance`.
    """
    mask, tokens = rows["mask"], rows["mask"].sum()
    gap = (rows["sampler_logprobs"] - rows["logprobs"]).abs() * mask
    figures = {
        **{name: column.mean() for name, column in measure_responses(rows, eval_kl_coef).items()},
        "task_reward_std": rows["task_rewards"].float().std(unbiased=False),
        "entropy": rows["entropy"].sum() / tokens,
        "logprob_diff_mean": gap.sum() / tokens,
        "logprob_diff_max": gap.max(),
        "importance_sampling_ratio": ((rows["logprobs"] - rows["sampler_logprobs"]).exp() * mask).sum() / tokens,
    }
    explained = {}
    if "returns" in rows:
        explained["explained_variance"] = token_ppo.explained_variance(rows["values"], rows["returns"], mask)
    return {name: float(value) for name, value in figures.items()} | explained


def mean_metrics(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each figure."""
    return {name: float(np.mean([each[name] for each in figures])) for name in figures[0]}


def repetition(tokens: Tensor, mask: Tensor) -> Tensor:
    """Share of a response's pairs of neighbouring tokens that stand earlier in it too.

    Args:
        tokens: `[B, T]` token ids below 2**31.
        mask: `[B, T]`.

    Returns:
        `[B]`, fp32, 0 to 1; 0 for a response of fewer than three tokens.
    """
    real = mask[:, 1:].bool()
    pairs = (tokens[:, :-1] << 31) + tokens[:, 1:]
    pairs = torch.where(real, pairs, -1).sort(dim=1).values
    repeats = ((pairs[:, 1:] == pairs[:, :-1]) & (pairs[:, 1:] >= 0)).sum(1)
    return repeats.float() / real.sum(1).clamp(min=1)
