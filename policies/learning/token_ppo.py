"""The formulas of token-level PPO with a KL penalty, as pure functions on `[B, T]` tensors. Policy losses: `losses`.

`B` responses, `T` response tokens, right-padded; `mask` is 1.0 on response tokens. Nothing here depends on RLlib or on
language models. Where the official code of the CORY paper (Ma et al. 2024, arXiv 2410.06101) has the same formulas, it
gives the same numbers.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def score_tokens(policy: Tensor, reference: Tensor | None, tokens: Tensor) -> tuple[Tensor, ...]:
    """Log-probabilities, entropy and KL of each token under a policy and its reference, from one softmax of each.

    Args:
        policy: `[B, T, V]` log-probabilities, fp32 or better; overwritten.
        reference: `[B, T, V]` log-probabilities, fp32 or better; None: no reference.
        tokens: `[B, T]` token ids.

    Returns:
        `[B, T]` each, in nats: log-probabilities of the tokens under the policy, entropy of the policy; and with a
        reference, log-probabilities of the tokens under it, and KL(policy || reference) over the whole vocabulary
        (CORY paper eq. 2).
    """
    index = tokens.unsqueeze(-1)
    logprobs = policy.gather(-1, index).squeeze(-1)
    probabilities = policy.exp()
    entropy = -(probabilities * policy).sum(-1)
    if reference is None:
        return logprobs, entropy
    full_kl = probabilities.mul_(policy.sub_(reference)).sum(-1)
    return logprobs, entropy, reference.gather(-1, index).squeeze(-1), full_kl


def sampled_kl(logprobs: Tensor, reference_logprobs: Tensor, estimator: Literal["k1", "k3"]) -> Tensor:
    """KL(policy || reference) estimated from the sampled token alone (Schulman 2020); `[B, T]` → `[B, T]`.

    With r = π_ref / π:

        k1 = -log r             unbiased, high variance
        k3 = (r - 1) - log r    unbiased, never negative

    k3 grows exponentially if the policy avoids a token of the reference. As in verl, it is computed with |log r| up to
    20, and at most 10 nats per token; beyond that it has no gradient. In fp32 it would be infinite above 88 nats.
    """
    log_ratio = logprobs - reference_logprobs
    if estimator == "k1":
        return log_ratio
    log_ratio = log_ratio.clamp(-20.0, 20.0)
    return (torch.expm1(-log_ratio) + log_ratio).clamp(max=10.0)


def overlong_penalty(lengths: Tensor, limits: Tensor, buffer: int, penalty: float = 1.0) -> Tensor:
    """Soft penalty for responses near the length limit (DAPO, Yu et al. 2025, arXiv 2503.14476, §3.4).

    With L the limit and c the buffer: 0 up to L - c tokens, then falling linearly to -penalty at L tokens.

    Args:
        lengths: `[B]`, tokens of each response.
        limits: `[B]`, L of each.
        buffer: c, in tokens.
        penalty: its size at the limit.

    Returns:
        `[B]`, at most 0, to be added to the rewards.
    """
    return -penalty * ((lengths - limits + buffer) / buffer).clamp(0.0, 1.0)


def token_rewards(rewards: Tensor, kl: Tensor, mask: Tensor, kl_coef: float | Tensor) -> Tensor:
    """Reward of each token (CORY paper eq. 2): -η · KL_t at every token, plus the response's reward at the last one.

    Args:
        rewards: `[B]`, reward of the whole response.
        kl: `[B, T]`, per-token KL to the reference.
        mask: `[B, T]`; a row without tokens gets no reward.
        kl_coef: η, the weight of the KL penalty; a number, or `[B, 1]`.

    Returns:
        `[B, T]`, zero outside the mask.
    """
    per_token = -kl_coef * kl * mask
    last = (mask.sum(1).long() - 1).clamp(min=0)
    per_token[torch.arange(len(per_token), device=per_token.device), last] += rewards.to(per_token.dtype)
    return per_token * mask


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016) over the response tokens.

        δ_t = r_t + γ · V_{t+1} - V_t
        A_t = δ_t + γ · λ · A_{t+1}

    The value after the last token is 0.

    Args:
        rewards: `[B, T]`.
        values: `[B, T]`; `values[:, t]` is the value before token t.
        mask: `[B, T]`.
        gamma: γ, the discount per token.
        lam: λ.

    Returns:
        `(advantages, returns)`, `[B, T]` each, zero outside the mask; returns are advantages + values.
    """
    values, rewards = values * mask, rewards * mask
    advantages = torch.zeros_like(rewards)
    advantage = torch.zeros_like(rewards[:, 0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        next_value = values[:, t + 1] if t + 1 < rewards.shape[1] else torch.zeros_like(advantage)
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * advantage
        advantages[:, t] = advantage
    return advantages * mask, (advantages + values) * mask


def masked_moments(x: Tensor, mask: Tensor) -> Tensor:
    """`(n, sum, sum of squares)` of `x` under `mask`, float64."""
    x, mask = x.double(), mask.double()
    return torch.stack([mask.sum(), (x * mask).sum(), (x * x * mask).sum()])


def whiten(x: Tensor, mask: Tensor, moments: Tensor) -> Tensor:
    """Scales `x` to zero mean and unit variance: (x - mean) / sqrt(variance + 1e-8).

    Args:
        x: `[B, T]`.
        mask: `[B, T]`.
        moments: of the whole batch, from `masked_moments`.

    Returns:
        `[B, T]`, zero outside the mask. The variance is unbiased.
    """
    count, total, squares = moments.tolist()
    mean = total / count
    variance = max(squares / count - mean * mean, 0.0) * (count / (count - 1.0) if count > 1 else 1.0)
    return (x - mean) * (variance + 1e-8) ** -0.5 * mask


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """PPO's clipped value loss: max((V - G)², (clip(V, V_old ± ε) - G)²) / 2.

    The *change* of the value is clipped; RLlib's own PPO clips the error instead.

    Args:
        values: `[B, T]`, of the weights being trained.
        old_values: `[B, T]`, of the weights before the update.
        returns: `[B, T]`.
        clip: ε, how far a value may move from the old one.

    Returns:
        `[B, T]`.
    """
    bounded = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (bounded - returns) ** 2)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) under the mask; 0.0 if the returns are constant."""
    keep = mask.bool()
    target, residual = returns[keep].double(), (returns - values)[keep].double()
    variance = float(target.var(unbiased=False)) if target.numel() else 0.0
    return 1.0 - float(residual.var(unbiased=False)) / variance if variance > 0 else 0.0


def adapt_kl_coef(kl_coef: float, kl: float, target: float, batch: int, horizon: int) -> float:
    """The adaptive KL controller of Ziegler et al. (2019): η ← η · (1 + clip(KL / target - 1, ±0.2) · batch / horizon).

    The coefficient changes by at most 20 % per horizon. Settings reject a horizon shorter than the batch, with which
    the factor could become negative.

    Args:
        kl_coef: η of the batch.
        kl: mean over the batch of the KL summed over a response, in nats.
        target: the target KL.
        batch: responses in the batch.
        horizon: responses over which the controller acts.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return kl_coef * (1.0 + error * batch / horizon)
