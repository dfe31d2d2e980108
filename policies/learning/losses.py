"""Policy losses and importance sampling weights, as pure functions on `[B, T]` tensors.

`B` responses, `T` response tokens, right-padded; `mask` is 1.0 on response tokens. `logprobs` are of the tokens under
the weights being trained, `old_logprobs` under those before the update. docs/algorithms.md compares the losses.

Two corrections meet in a policy loss, and each applies once. The *ratio* ρ = exp(logprobs - old_logprobs) is for the
optimizer steps of an update: `old_logprobs` are the learner's before the first one. The *importance sampling weight* is
for what happened before: the learner's `old_logprobs` against those of the engine that sampled the tokens. The policy
loss is multiplied by it; the value loss, the KL and the entropy are not. With the setting `old_logprobs=sampler`, the
ratio is to the engine's log-probabilities and corrects for both; then there are no weights.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from policies.learning import token_ppo
from policies.learning.hyperparameters import Hyperparameters
from policies.learning.rows import TrainRows

LOG_RATIO_LIMIT = 20.0
"""Bound of |log ρ|, as in verl. Without it, exp overflows in fp32, and the gradient of a clipped token would be NaN."""


def total_loss(
    outputs: tuple[Tensor, Tensor | None, Tensor | None], rows: TrainRows, h: Hyperparameters, kl_coef: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of rows, *summed* over response tokens with their weights (`token_weights`).

        w · L_policy                           without a critic
        w · L_policy + value_coef · L_value    with a critic
        w · L_policy + kl_coef · k3            with the KL in the loss (GRPO, Dr. GRPO)
        ... - entropy_coef · H                 with an entropy bonus

    w are the importance sampling weights.

    Args:
        outputs: log-probabilities, values and entropy under the weights being trained (`PolicyModel.forward`).

    Returns:
        The loss, a scalar; and the sums over tokens of each of `Hyperparameters.loss_metrics` and of the loss,
        detached.
    """
    logprobs, values, entropy = outputs
    if h.single_pass:
        rows = replace(rows, logprobs=logprobs.detach())
    policy_losses, clipped = policy_loss(logprobs, rows, h)
    weights, out_of_bounds = importance_sampling_weights(rows, h)
    by_token = token_weights(rows.mask, h)
    loss = (policy_losses * weights * by_token).sum()
    shares = {name: (tokens * by_token).sum() for name, tokens in {**clipped, **out_of_bounds}.items()}
    sums = {"policy_loss": loss.detach(), **shares}
    if values is not None:
        assert rows.values is not None and rows.returns is not None, "scored with a critic"
        value_loss = (token_ppo.value_loss(values, rows.values, rows.returns, h.value_clip) * by_token).sum()
        sums["value_loss"] = value_loss.detach()
        loss = loss + h.value_coef * value_loss
    if h.kl_in_loss and rows.reference_logprobs is not None:
        kl = token_ppo.sampled_kl(logprobs, rows.reference_logprobs, "k3")
        loss = loss + (kl_coef * kl * by_token).sum()
    if entropy is not None:
        loss = loss - h.entropy_coef * (entropy * by_token).sum()
    return loss, {**sums, "loss": loss.detach()}


def policy_loss(logprobs: Tensor, rows: TrainRows, h: Hyperparameters) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy loss that the setting `loss` selects.

    Returns:
        The loss of every token, and by metric name 1.0 for the tokens that it counts; `[B, T]` each.
    """
    old_logprobs, advantages = rows.logprobs, rows.advantages
    if h.loss == "cispo":
        loss, clipped = cispo(logprobs, old_logprobs, advantages, *h.clip_range)
    elif h.loss == "gspo":
        loss, clipped = gspo(logprobs, old_logprobs, advantages, rows.mask, *h.clip_range)
    else:
        loss, clipped = ppo(logprobs, old_logprobs, advantages, *h.clip_range)
    counted = {"clip_fraction": clipped}
    if h.dual_clip is not None:  # settings allow it with PPO's loss only
        loss, counted["dual_clip_fraction"] = bound_negative_advantages(loss, advantages, h.dual_clip)
    return loss, counted


def ppo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_ratio: float, clip_ratio_high: float | None = None
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate loss (Schulman et al. 2017): max(-A · ρ, -A · clip(ρ, 1 - ε, 1 + ε_high)).

    Args:
        clip_ratio: ε.
        clip_ratio_high: ε_high (clip-higher of DAPO, Yu et al. 2025, §3.1); None: ε.

    Returns:
        `(loss, clipped)`, `[B, T]` each: the loss of every token, and 1.0 if its ratio was clipped.
    """
    return _clipped_surrogate(_ratio(logprobs - old_logprobs), advantages, clip_ratio, clip_ratio_high)


def bound_negative_advantages(loss: Tensor, advantages: Tensor, dual_clip: float) -> tuple[Tensor, Tensor]:
    """Dual-clip PPO (Ye et al. 2020): for A < 0, min(loss, -A · c).

    PPO clips the ratio of a token with a negative advantage from below only; one that has become much more probable
    would dominate the update.

    Args:
        loss: `[B, T]`, from `ppo`.
        dual_clip: c, above 1.

    Returns:
        `(loss, bounded)`, `[B, T]` each: the loss of every token, and 1.0 if it was bounded. A bounded token has no
        gradient.
    """
    bound = -advantages * dual_clip
    bounded = (advantages < 0) & (loss > bound)
    return torch.where(bounded, bound, loss), bounded.to(loss.dtype)


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_ratio: float,
    clip_ratio_high: float | None = None,
) -> tuple[Tensor, Tensor]:
    """GSPO (Zheng et al. 2025): PPO's loss with one ratio per response, s = exp(mean_t log ρ_t).

    Its gradient goes through each token's own log-probability, sg(s) · ρ_t / sg(ρ_t) (the paper's GSPO-token). If all
    tokens of a response have the same advantage, that is the gradient of s. `token_weights` averages over the response.
    Arguments and results are those of `ppo`.
    """
    log_ratio = ((logprobs - old_logprobs) * mask).detach().sum(1, keepdim=True) / _lengths(mask)
    log_ratio = log_ratio + (logprobs - logprobs.detach())
    return _clipped_surrogate(_ratio(log_ratio), advantages, clip_ratio, clip_ratio_high)


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_ratio: float, clip_ratio_high: float
) -> tuple[Tensor, Tensor]:
    """CISPO (MiniMax 2025): -sg(clip(ρ, 1 - ε, 1 + ε_high)) · A · logprobs.

    The clipped ratio is a weight without a gradient, so every token keeps one; PPO drops those that it clips. Arguments
    and results are those of `ppo`; with ε = 1 there is no lower bound.
    """
    ratio = _ratio((logprobs - old_logprobs).detach())
    weights = ratio.clamp(1.0 - clip_ratio, 1.0 + clip_ratio_high)
    return -weights * advantages * logprobs, (weights != ratio).to(ratio.dtype)


def token_weights(mask: Tensor, h: Hyperparameters) -> Tensor:
    """The weight of each token in the mean loss of a mini-batch: 1; with `loss=gspo` 1 / length of its response.

    A mini-batch's loss is the sum of the weighted losses of its tokens, divided by the sum of their weights. So all
    tokens are equal, or with `loss=gspo` all responses. `[B, T]`, zero outside the mask.
    """
    return mask / _lengths(mask) if h.loss == "gspo" else mask


def importance_sampling_weights(rows: TrainRows, h: Hyperparameters) -> tuple[Tensor, dict[str, Tensor]]:
    """Importance sampling weights (Yao et al. 2025): π_learner / π_sampler, kept within [clip_min, clip_max].

    They correct the bias from tokens that were sampled with other kernels and precision (engines compute in bf16) or
    with older weights than the learner's.

    By `importance_sampling_mode`, `token_*`: each token has its own ratio; `sequence_*`: all tokens of a response have
    the product of their ratios. `*_truncate`: a ratio out of bounds is set to the bound; `*_mask`: to 0. Without
    `importance_sampling_clip_max` all weights are 1, without `importance_sampling_clip_min` there is no lower bound.

    Returns:
        The weights `[B, T]`, without a gradient, undefined outside the mask; and by metric name 1.0 for the tokens
        whose ratio was above or below the bounds.
    """
    clip_min, clip_max = h.importance_sampling_clip_min, h.importance_sampling_clip_max
    if clip_max is None:
        return torch.ones_like(rows.logprobs), {}
    log_ratio = rows.logprobs - rows.sampler_logprobs
    if h.importance_sampling_mode.startswith("sequence"):
        log_ratio = (log_ratio * rows.mask).sum(1, keepdim=True).expand_as(log_ratio)
    ratio = torch.exp(log_ratio)
    out_of_bounds = {"importance_sampling_frac_high": ratio > clip_max}
    if clip_min is not None:
        out_of_bounds["importance_sampling_frac_low"] = ratio < clip_min
    weights = ratio.clamp(clip_min, clip_max)
    if h.importance_sampling_mode.endswith("mask"):
        weights = weights.masked_fill(weights != ratio, 0.0)
    return weights, {name: tokens.to(ratio.dtype) for name, tokens in out_of_bounds.items()}


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_ratio: float, clip_ratio_high: float | None
) -> tuple[Tensor, Tensor]:
    unclipped = -advantages * ratio
    bounded = -advantages * ratio.clamp(
        1.0 - clip_ratio, 1.0 + (clip_ratio if clip_ratio_high is None else clip_ratio_high)
    )
    return torch.maximum(unclipped, bounded), (bounded > unclipped).to(unclipped.dtype)


def _ratio(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def _lengths(mask: Tensor) -> Tensor:
    """The number of tokens of each response, at least 1; `[B, 1]`."""
    return mask.sum(1, keepdim=True).clamp(min=1.0)
