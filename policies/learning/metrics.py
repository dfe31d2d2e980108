"""Metrics of one policy's responses, from their scored rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from policies.learning import token_ppo
from policies.learning.rows import Rows, ScoredRows, TrainRows

RESPONSE_METRICS = ("task_reward", "kl", "combined_reward", "response_length", "eos_rate", "repetition")
"""Metrics of each response, in training and in evaluations."""
SAMPLER_METRICS = ("logprob_diff_mean", "logprob_diff_max", "importance_sampling_ratio")
"""Reported metrics that compare the sampler with the learner."""
LOGPROB_DIFF = ("logprob_diff_mean", "logprob_diff_std", "logprob_diff_tokens")
"""Metrics that the weight-sync check compares with its limit (`policies.sync_check.LogprobDiff`)."""
NO_METRICS = dict.fromkeys((*RESPONSE_METRICS, "task_reward_std"), float("nan"))
"""Metrics of an LLM or role without responses."""


def compute_response_metrics(rows: ScoredRows, eval_kl_coef: float) -> dict[str, Tensor]:
    """Metrics of each response of one policy.

    Args:
        eval_kl_coef: weight of the KL in the combined reward (CORY paper §5: own task reward - η · summed KL).

    Returns:
        fp32 `[B]` each, in an environment `[E]`, one per agent of an episode, by episode and agent, over all its turns:
        sums of rewards, KL and lengths, and means of the others.
        `task_reward` (NaN if the role has none), `kl` (nats, summed over the response),
        `combined_reward`, `response_length` (tokens), `eos_rate` (1 if it ends with a stop token), `repetition`. If the
        rows were scored without the reference, `kl` is NaN, and so is `combined_reward` if the KL has a weight in it.
        If they were scored with the reference but not with the policy, `kl` is NaN too, and `combined_reward` has
        `kl_k3`, the KL estimated from the sampled tokens.
    """
    task_reward = rows.task_rewards.float()
    kl = torch.full_like(task_reward, torch.nan) if rows.full_kl is None else rows.full_kl.sum(1)
    sampled = {}
    if rows.full_kl is None and rows.reference_logprobs is not None:
        sampled["kl_k3"] = (token_ppo.sampled_kl(rows.logprobs, rows.reference_logprobs, "k3") * rows.mask).sum(1)
    metrics = {
        "task_reward": task_reward,
        "kl": kl,
        "combined_reward": task_reward - eval_kl_coef * sampled.get("kl_k3", kl) if eval_kl_coef else task_reward,
        "response_length": rows.mask.sum(1),
        "eos_rate": rows.ended,
        "repetition": repetition(rows.responses, rows.mask),
        **sampled,
    }
    if rows.turns is None:
        return metrics
    agents = torch.stack([rows.chains, rows.positions], dim=1).unique(dim=0, return_inverse=True)[1]
    counts = agents.bincount().float()
    sums = {name: torch.zeros_like(counts).index_add(0, agents, column) for name, column in metrics.items()}
    return {name: sums[name] / counts if name in ("eos_rate", "repetition") else sums[name] for name in metrics}


def compute_metrics(rows: ScoredRows, eval_kl_coef: float) -> dict[str, float]:
    """Metrics of one policy's scored rows; for the arguments see `compute_response_metrics`.

    Returns:
        Means over responses (with a task reward) of the metrics of `compute_response_metrics`, and `task_reward_std`.
        With thoughts, `thought_cut_rate`, the share of responses whose thought was cut off.
        The mean over tokens of `entropy`; of rows that the policy did not score, of its estimate -log π(token). Of
        those that it scored, `SAMPLER_METRICS`. Of training rows with a critic, `explained_variance`.
    """
    mask, tokens = rows.mask, rows.mask.sum()
    response_metrics = compute_response_metrics(rows, eval_kl_coef)
    rewards = response_metrics["task_reward"]
    metrics = {
        **{name: column.nanmean() for name, column in response_metrics.items()},
        "task_reward_std": rewards[~rewards.isnan()].std(unbiased=False) if not rewards.isnan().all() else torch.nan,
        "entropy": (-rows.logprobs if rows.entropy is None else rows.entropy).sum() / tokens,
    }
    if rows.entropy is not None:
        compared = compare_logprobs(rows, rows.logprobs)
        metrics |= {name: compared[name] for name in SAMPLER_METRICS}
    if rows.thought_cut is not None:
        metrics["thought_cut_rate"] = rows.thought_cut.mean()
    if isinstance(rows, TrainRows) and rows.values is not None and rows.returns is not None:
        metrics["explained_variance"] = token_ppo.explained_variance(rows.values, rows.returns, mask)
    return {name: float(value) for name, value in metrics.items()}


def compare_logprobs(rows: Rows, logprobs: Tensor) -> dict[str, Tensor]:
    """Compares the sampler's log-probabilities in rows with the learner's, `[B, R]`.

    Returns:
        `logprob_diff_mean` and `logprob_diff_max`, over tokens, of |sampler - learner| log-probability, in nats; and
        the mean `importance_sampling_ratio` (learner's / sampler's probability, before clipping). Also the standard
        deviation `logprob_diff_std`, and the number of tokens, `logprob_diff_tokens`.
    """
    mask, tokens = rows.mask, rows.mask.sum()
    difference = (rows.sampler_logprobs - logprobs).abs()
    return {
        "logprob_diff_mean": (difference * mask).sum() / tokens,
        "logprob_diff_max": (difference * mask).max(),
        "importance_sampling_ratio": ((logprobs - rows.sampler_logprobs).exp() * mask).sum() / tokens,
        "logprob_diff_std": difference[mask.bool()].std(correction=0),
        "logprob_diff_tokens": tokens,
    }


def mean_metrics(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over several sets of the same metrics; `NO_METRICS` if there is none."""
    if not metrics:
        return {**NO_METRICS}
    return {name: float(np.mean([values[name] for values in metrics])) for name in metrics[0]}


def nanmean(values: Sequence[float] | np.ndarray) -> float:
    """The mean of the values that are not NaN; NaN if all are."""
    present = np.asarray(values)[~np.isnan(values)]
    return float(present.mean()) if len(present) else float("nan")


def repetition(tokens: Tensor, mask: Tensor) -> Tensor:
    """Share of a response's bigrams that occur earlier in it; `[B]`, fp32, 0 for fewer than three tokens.

    Args:
        tokens: `[B, T]` token ids below 2**31.
    """
    valid = mask[:, 1:].bool()
    pairs = (tokens[:, :-1] << 31) + tokens[:, 1:]
    pairs = torch.where(valid, pairs, -1).sort(dim=1).values
    repeats = ((pairs[:, 1:] == pairs[:, :-1]) & (pairs[:, 1:] >= 0)).sum(1)
    return repeats.float() / valid.sum(1).clamp(min=1)
