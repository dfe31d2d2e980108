"""Advantages without a critic: a response is compared with other responses, not with a value that was learned.

Pure functions, as in `token_ppo`. `B` responses of one LLM to the queries of one update; equal numbers in `groups` are
what it answered to the same query in the same role. Groups may differ in size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from policies.learning import token_ppo

Estimator = Callable[[Tensor, Tensor], Tensor]

EPSILON = 1e-4
"""What GRPO adds to a group's deviation (trl's number): below it, differences count as noise."""


EQUAL = 1e-9
"""Rewards of a group that lie no farther from their mean count as equal; sums of equal rewards differ by rounding."""


def reinforce(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """REINFORCE++ (Hu et al. 2025): the rewards from each token on, whitened over the batch.

    The batch's mean is the baseline, so one response per query will do.

    Args:
        rewards, mask: `[B, T]`, of `token_ppo.token_rewards`.
        gamma: discount per token.

    Returns:
        `[B, T]`, zero outside the mask.
    """
    to_go, _ = token_ppo.gae(rewards, torch.zeros_like(rewards), mask, gamma, lam=1.0)
    return token_ppo.whiten(to_go, mask, token_ppo.masked_moments(to_go, mask))


def rloo(paid: Tensor, groups: Tensor) -> Tensor:
    """REINFORCE leave-one-out (Kool et al. 2019, Ahmadian et al. 2024): less the mean of the *others* of the group.

    Args:
        paid: `[B]`, reward of each whole response.
        groups: `[B]`, int64.

    Returns:
        `[B]`, fp32; 0 for a response alone in its group, which has nothing to be compared with.
    """
    centred, size, _ = _centred(paid, groups)
    return (centred * size / (size - 1).clamp(min=1)).float()


def mean_of_others(paid: Tensor, groups: Tensor) -> Tensor:
    """The mean of the *others* of the group, arguments and result as of `rloo`; 0 for a response alone in it."""
    _, size, _ = _centred(paid, groups)
    return torch.where(size > 1, paid - rloo(paid, groups), 0.0).float()


def dr_grpo(paid: Tensor, groups: Tensor) -> Tensor:
    """Dr. GRPO (Liu et al. 2025): less the mean of the group; arguments and result as of `rloo`."""
    return _centred(paid, groups)[0].float()


def grpo(paid: Tensor, groups: Tensor) -> Tensor:
    """GRPO (Shao et al. 2024): less the mean of the group, by its unbiased deviation; as `rloo` otherwise.

    A group that is paid alike teaches nothing: all get 0.
    """
    centred, size, group = _centred(paid, groups)
    squares = torch.zeros_like(centred).index_add(0, group, centred**2)[group]
    return (centred / ((squares / (size - 1).clamp(min=1)).sqrt() + EPSILON)).float()


GROUPED: dict[str, Estimator] = {"rloo": rloo, "grpo": grpo, "dr_grpo": dr_grpo}
"""The estimators that compare responses to the same query."""


def has_nonzero_std(paid: Tensor, groups: Tensor) -> Tensor:
    """Whether a response's group was not all paid alike; `[B]`, bool."""
    centred, _, group = _centred(paid, groups)
    largest = torch.zeros(int(group.max()) + 1, dtype=torch.float64).scatter_reduce(0, group, centred.abs(), "amax")
    return largest[group] > EQUAL


def _centred(paid: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What is paid less its group's mean, the group's size, and its number; `[B]` each, float64 but the last."""
    _, group, sizes = groups.unique(return_inverse=True, return_counts=True)
    paid = paid.double()
    means = torch.zeros_like(sizes, dtype=torch.float64).index_add(0, group, paid) / sizes
    return paid - means[group], sizes[group].double(), group
