"""Critic-free advantage estimators: the baseline comes from other responses, not from a learned value.

Pure functions, as in `token_ppo`. `B` responses of one policy in one update. Responses with equal numbers in `groups`
answer the same query in the same role. Groups may differ in size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from policies.learning import token_ppo

GroupEstimator = Callable[[Tensor, Tensor], Tensor]

STD_EPSILON = 1e-4
"""Added to a group's standard deviation by GRPO, as in TRL; smaller differences in reward count as noise."""

ZERO_STD_TOLERANCE = 1e-6
"""Rewards of a group count as equal if none differs from their mean by more than this share of the largest magnitude
(or, near 0, by `ZERO_STD_ABSOLUTE_TOLERANCE`). fp32 rounds to 6e-8: sums of equal rewards differ by rounding, and so
does a mean of equal rewards from them. Without a tolerance, division by the standard deviation would amplify that."""
ZERO_STD_ABSOLUTE_TOLERANCE = 1e-9


def reinforce(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """REINFORCE++ (Hu et al. 2025): A_t = whiten(Σ_{k≥t} γ^(k-t) · r_k), the reward-to-go whitened over the batch.

    The batch mean is the baseline, so one response per query is enough. `rewards` are from `token_ppo.token_rewards`;
    the result is `[B, T]`, zero outside the mask.
    """
    reward_to_go, _ = token_ppo.gae(rewards, torch.zeros_like(rewards), mask, gamma, lam=1.0)
    return token_ppo.whiten(reward_to_go, mask, token_ppo.masked_moments(reward_to_go, mask))


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """REINFORCE leave-one-out (Kool et al. 2019, Ahmadian et al. 2024): A_i = r_i - mean_{j≠i} r_j over the group.

    As with all estimators here, groups with zero reward variance (`ZERO_STD_TOLERANCE`) get an advantage of exactly 0.

    Args:
        rewards: `[B]`, reward of each response.
        groups: `[B]`, int64.

    Returns:
        `[B]`, fp32; 0 in a group of one.
    """
    centred, size, _ = _center_by_group(rewards, groups)
    return (centred * size / (size - 1).clamp(min=1)).float()


def dr_grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """Dr. GRPO (Liu et al. 2025): A_i = r_i - mean(r) over the group; same shapes as in `rloo`."""
    return _center_by_group(rewards, groups)[0].float()


def grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """GRPO (Shao et al. 2024): A_i = (r_i - mean(r)) / (std(r) + ε) over the group; same shapes as in `rloo`.

    The standard deviation is unbiased.
    """
    return _normalize_by_group(rewards, groups, STD_EPSILON).float()


def gdpo(
    rewards: Tensor, groups: Tensor, weights: Sequence[float], mask: Tensor, epsilon: float = STD_EPSILON
) -> Tensor:
    """GDPO (Liu et al. 2026, arXiv 2601.05242): A_i = whiten(Σ_k w_k · (r_ik - mean(r_k)) / (std(r_k) + ε)).

    Each reward is normalized in the group by itself, so that none drowns the others; in the sum of the rewards, as in
    `grpo`, those with a larger spread do. The weighted sum is whitened over the tokens of the batch.

    Args:
        rewards: `[B, K]`, K rewards of each response.
        groups: `[B]`, int64.
        weights: K numbers.
        mask: `[B, T]`.
        epsilon: added to a group's standard deviations.

    Returns:
        `[B, T]`, zero outside the mask, and in groups in which all rewards of a weight other than 0 have zero variance.
    """
    normalized = [weight * _normalize_by_group(rewards[:, k], groups, epsilon) for k, weight in enumerate(weights)]
    totals = torch.stack(normalized).sum(0).to(mask.dtype).unsqueeze(1) * mask
    whitened = token_ppo.whiten(totals, mask, token_ppo.masked_moments(totals, mask))
    counted = rewards * torch.tensor(weights).bool()
    return whitened * has_nonzero_std(counted, groups).unsqueeze(1)


GROUP_ESTIMATORS: dict[str, GroupEstimator] = {"rloo": rloo, "grpo": grpo, "dr_grpo": dr_grpo}
"""The estimators that compare responses to the same query, by the value of the setting `advantage`."""


def has_nonzero_std(rewards: Tensor, groups: Tensor) -> Tensor:
    """Whether the rewards of each response's group differ, by more than `ZERO_STD_TOLERANCE`; `[B]`, bool.

    Of several rewards `[B, K]`, whether any differs.
    """
    if rewards.dim() == 2:
        return torch.stack([has_nonzero_std(column, groups) for column in rewards.unbind(1)]).any(0)
    centred, _, group = _center_by_group(rewards, groups)
    return _group_max(centred.abs(), group) > 0


def _center_by_group(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rewards minus their group's mean, group sizes (both float64), and group indices; `[B]` each.

    In zero-variance groups, the differences from the mean are exactly 0.
    """
    _, group, sizes = groups.unique(return_inverse=True, return_counts=True)
    rewards = rewards.double()
    means = torch.zeros_like(sizes, dtype=torch.float64).index_add(0, group, rewards) / sizes
    centred = rewards - means[group]
    limit = (ZERO_STD_TOLERANCE * _group_max(rewards.abs(), group)).clamp(min=ZERO_STD_ABSOLUTE_TOLERANCE)
    return centred * (_group_max(centred.abs(), group) > limit), sizes[group].double(), group


def _normalize_by_group(rewards: Tensor, groups: Tensor, epsilon: float) -> Tensor:
    """Returns rewards minus their group's mean, over its standard deviation plus epsilon; `[B]`, float64."""
    centred, size, group = _center_by_group(rewards, groups)
    squares = torch.zeros_like(centred).index_add(0, group, centred**2)[group]
    return centred / ((squares / (size - 1).clamp(min=1)).sqrt() + epsilon)


def _group_max(values: Tensor, group: Tensor) -> Tensor:
    """Returns the maximum of each response's group, of values of at least 0; `[B]`, float64."""
    maxima = torch.zeros(int(group.max()) + 1, dtype=torch.float64)
    return maxima.scatter_reduce(0, group, values, "amax")[group]
