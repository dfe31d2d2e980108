"""The formulas of token-level PPO with a KL penalty, as pure functions on `[B, T]` tensors.

`B` responses, `T` response tokens, right-padded; `mask` is 1.0 on real response tokens. Nothing here knows of RLlib
or of language models. Where the method's official code computes the same, the numbers agree.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def compare(policy: Tensor, reference: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores tokens under a policy and its reference, from one softmax of each.

    Args:
        policy, reference: `[B, T, V]` log-probabilities, fp32 or better; `policy` is overwritten.
        tokens: `[B, T]` token ids.

    Returns:
        Log-probabilities of the tokens under both, entropy of the policy, and KL(policy || reference) over the whole
        vocabulary (paper eq. 2); `[B, T]` each, in nats.
    """
    chosen = tokens.unsqueeze(-1)
    logprobs, reference_logprobs = policy.gather(-1, chosen).squeeze(-1), reference.gather(-1, chosen).squeeze(-1)
    probabilities = policy.exp()
    policy_entropy = -(probabilities * policy).sum(-1)
    return logprobs, reference_logprobs, policy_entropy, probabilities.mul_(policy.sub_(reference)).sum(-1)


def sampled_kl(logprobs: Tensor, reference_logprobs: Tensor, estimator: Literal["k1", "k3"]) -> Tensor:
    """KL(policy || reference) estimated from the sampled token alone, `[B, T]` → `[B, T]`.

    `k1` is log(pi/pi_ref), unbiased and noisy; `k3` is (pi_ref/pi - 1) + log(pi/pi_ref), unbiased and never negative.
    """
    difference = logprobs - reference_logprobs
    if estimator == "k1":
        return difference
    return torch.expm1(-difference) + difference


def token_rewards(paid: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Rewards of each token: the KL penalty everywhere, what was paid at the last token too (paper eq. 2).

    Args:
        paid: `[B]`, for the whole response.
        kl: `[B, T]`, per-token KL to the reference.
        mask: `[B, T]`; a row without tokens is paid nowhere.
        kl_coef: weight of the penalty (eta).

    Returns:
        `[B, T]`, zero outside the mask.
    """
    rewards = -kl_coef * kl * mask
    last = (mask.sum(1).long() - 1).clamp(min=0)
    rewards[torch.arange(len(rewards), device=rewards.device), last] += paid.to(rewards.dtype)
    return rewards * mask


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the response tokens; after the last one the value is zero.

    Args:
        rewards, values, mask: `[B, T]`; `values[:, t]` is the value before token t.
        gamma: discount per token.
        lam: lambda.

    Returns:
        `(advantages, returns)`, `[B, T]` each, zero outside the mask.
    """
    values, rewards = values * mask, rewards * mask
    advantages = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[:, 0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        following = values[:, t + 1] if t + 1 < rewards.shape[1] else torch.zeros_like(running)
        running = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * running
        advantages[:, t] = running
    return advantages * mask, (advantages + values) * mask


def masked_moments(x: Tensor, mask: Tensor) -> Tensor:
    """`(n, sum, sum of squares)` of `x` under `mask`, float64."""
    x, mask = x.double(), mask.double()
    return torch.stack([mask.sum(), (x * mask).sum(), (x * x * mask).sum()])


def whiten(x: Tensor, mask: Tensor, moments: Tensor) -> Tensor:
    """Scales `x` to zero mean and unit variance.

    Args:
        x, mask: `[B, T]`.
        moments: of the whole batch, from `masked_moments`.

    Returns:
        `[B, T]`, zero outside the mask; the variance is the unbiased one, epsilon 1e-8.
    """
    count, total, squares = moments.tolist()
    mean = total / count
    variance = max(squares / count - mean * mean, 0.0) * (count / (count - 1.0) if count > 1 else 1.0)
    return (x - mean) * (variance + 1e-8) ** -0.5 * mask


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_ratio: float, clip_ratio_high: float | None = None
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate.

    Args:
        logprobs: `[B, T]`, of the tokens under the weights that learn.
        old_logprobs: `[B, T]`, under the weights that answered.
        advantages: `[B, T]`.
        clip_ratio: how far the probability ratio may be from 1.
        clip_ratio_high: how far above it, if that is another number (DAPO, Yu et al. 2025, §3.1).

    Returns:
        `(loss, clipped)`, `[B, T]` each: the loss of every token, and 1.0 where the clip was active.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(
        1.0 - clip_ratio, 1.0 + (clip_ratio if clip_ratio_high is None else clip_ratio_high)
    )
    return torch.maximum(plain, bounded), (bounded > plain).to(plain.dtype)


def importance_sampling_weights(logprobs: Tensor, sampler_logprobs: Tensor, cap: float | None) -> Tensor:
    """Truncated importance weights of tokens that were drawn by other arithmetic, or other weights, than are learned.

    min(π_learner / π_sampler, cap) (Yao et al. 2025, "truncated importance sampling"): engines compute in bf16 and with
    other kernels, which biases the gradient; the cap bounds what a rare token can weigh.

    Args:
        logprobs: `[B, T]`, by the learner, before it learns.
        sampler_logprobs: `[B, T]`, as the engine reported them.
        cap: the largest weight; None: all weigh 1.

    Returns:
        `[B, T]`, without a gradient.
    """
    if cap is None:
        return torch.ones_like(logprobs)
    return torch.exp(logprobs - sampler_logprobs).clamp(max=cap)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Half the squared error, with the value's *change* clipped (RLlib's own PPO clamps the error instead).

    Args:
        values: `[B, T]`, of the weights that learn.
        old_values: `[B, T]`, of the weights that answered.
        returns: `[B, T]`.
        clip: how far a value may move from the old one.

    Returns:
        `[B, T]`.
    """
    bounded = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (bounded - returns) ** 2)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) under the mask; 0.0 where the returns do not vary."""
    keep = mask.bool()
    target, residual = returns[keep].double(), (returns - values)[keep].double()
    variance = float(target.var(unbiased=False)) if target.numel() else 0.0
    return 1.0 - float(residual.var(unbiased=False)) / variance if variance > 0 else 0.0


def adapt_kl_coef(kl_coef: float, kl: float, target: float, batch: int, horizon: int) -> float:
    """The adaptive controller of Ziegler et al. (2019): moves the coefficient by at most 20 % per horizon.

    Settings refuse a horizon shorter than the batch, by which the factor could become negative.

    Args:
        kl_coef: the coefficient that the batch was trained with.
        kl: mean over the batch of the KL summed over a response, in nats.
        target: KL sought.
        batch: responses in the batch.
        horizon: responses over which the controller moves.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return kl_coef * (1.0 + error * batch / horizon)
