"""Advantage estimation: from the rewards of one policy's responses to the advantages that it trains on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from policies.learning import token_ppo
from policies.learning.advantages import GROUP_ESTIMATORS, gdpo, has_nonzero_std, reinforce
from policies.learning.hyperparameters import Hyperparameters
from policies.learning.rows import Estimates, Rows, ScoredRows


@dataclass
class RewardMoments:
    """Running mean and variance of the training rewards, by the parallel Welford algorithm (Chan et al. 1979).

    With `reward_scaling=normalize` the first batch is exactly z-scored.
    """

    mean: float = 0.0
    variance: float = 1.0
    count: float = 1e-24

    def update(self, rewards: Tensor) -> float:
        """Adds a batch of rewards `[B]`; returns the batch's mean."""
        count, total, squares = token_ppo.masked_moments(rewards, torch.ones_like(rewards)).tolist()
        batch_mean = total / count
        batch_variance = max(squares / count - batch_mean**2, 0.0)
        delta, total_count = batch_mean - self.mean, self.count + count
        squared_error = (
            self.variance * self.count + batch_variance * count + delta**2 * self.count * count / total_count
        )
        self.mean += delta * count / total_count
        self.variance = squared_error / total_count
        self.count = total_count
        return batch_mean

    @property
    def std(self) -> float:
        """Unbiased running standard deviation; 0 with fewer than two rewards."""
        return (self.variance * self.count / (self.count - 1.0)) ** 0.5 if self.count >= 2 else 0.0

    def scale(self, rewards: Tensor, mode: Literal["none", "scale", "normalize"]) -> Tensor:
        """Divides rewards `[B]` by the running standard deviation; `normalize` first subtracts the running mean.

        While all rewards so far are equal, nothing is divided.
        """
        if mode == "none":
            return rewards
        shifted = rewards - self.mean if mode == "normalize" else rewards
        if self.std <= 1e-6 * max(abs(self.mean), 1.0):
            return shifted
        return shifted / (self.std + torch.finfo(torch.float32).eps)


class AdvantageEstimator:
    """Estimates the advantages of one policy's responses over the whole batch of an update.

    Its state is the KL coefficient, which `kl_target` adapts, and the running reward moments.
    """

    def __init__(self, hyperparameters: Hyperparameters) -> None:
        """Starts with `hyperparameters.kl_coef` and empty reward moments."""
        self.hyperparameters = hyperparameters
        self.reset()

    def reset(self) -> None:
        """Resets the KL coefficient and the reward moments."""
        self.kl_coef = self.hyperparameters.kl_coef
        self.reward_moments = RewardMoments()

    def _kl(self, rows: Rows) -> Tensor:
        """The KL to the reference at each token, by `kl_estimator`; `[B, R]`, 0 without reference scores."""
        h = self.hyperparameters
        if not isinstance(rows, ScoredRows) or rows.reference_logprobs is None:
            return torch.zeros_like(rows.mask)
        if h.kl_estimator == "full":
            assert rows.full_kl is not None, "scored with the policy"
            return rows.full_kl
        return token_ppo.sampled_kl(rows.logprobs, rows.reference_logprobs, h.kl_estimator) * rows.mask

    def value_and_return(self, rows: Rows, rewards: Tensor) -> tuple[Tensor, Tensor]:
        """The value V before each response's first token, and the return G from there.

        Args:
            rows: scored; without a critic unscored ones count as without KL.
            rewards: reward of each response, `[B]`.

        Returns:
            V, `[B]`: the critic's value; 0 without a critic.
            G, `[B]`: the λ-return; without a critic the sum of the token rewards.
        """
        h, mask = self.hyperparameters, rows.mask
        if h.kl_in_loss:
            return torch.zeros_like(rewards), rewards
        token_rewards = token_ppo.token_rewards(rewards, self._kl(rows), mask, self.kl_coef)
        values = _values(rows) if h.critic else torch.zeros_like(token_rewards)
        _, returns = token_ppo.gae(token_rewards, values, mask, h.gamma, h.lam if h.critic else 1.0)
        return values[:, 0], returns[:, 0]

    def estimate(
        self, rows: ScoredRows, rewards: Tensor, reward_parts: Tensor | None = None
    ) -> tuple[Estimates, dict[str, float]]:
        """Estimates the advantages of an update's responses.

        Args:
            rows: all rows of the policy.
            rewards: `[B]`, from `assign_credit`.
            reward_parts: `[B, K]`, with `gdpo`, from `assign_part_credit`.

        Returns:
            The estimates; their rewards have the penalty of `overlong=penalty`.
            The metrics `kl_coef` (the one used here) and `credited_reward`; with a group estimator `frac_zero_std`, the
            share of responses in zero-variance groups, and in an environment `frac_alone`, the share of those without
            any other to compare with, whose advantage is 0; with `overlong=penalty` the mean `overlong_penalty`.
        """
        h, mask, kl = self.hyperparameters, rows.mask, self._kl(rows)
        metrics = {"kl_coef": self.kl_coef}
        returns: Tensor | None = None
        if h.overlong == "penalty":
            assert h.overlong_buffer is not None
            limits = torch.tensor(h.response_limits)[rows.positions]
            penalties = token_ppo.overlong_penalty(mask.sum(1), limits, h.overlong_buffer, h.overlong_penalty)
            rewards = rewards + penalties
            metrics["overlong_penalty"] = float(penalties.mean())
        metrics["credited_reward"] = self.reward_moments.update(rewards)
        scaled = self.reward_moments.scale(rewards, h.reward_scaling)
        token_rewards = token_ppo.token_rewards(scaled, kl, mask, self.kl_coef)
        if h.critic:
            advantages, returns = token_ppo.gae(token_rewards, _values(rows), mask, h.gamma, h.lam)
            advantages = token_ppo.whiten(advantages, mask, token_ppo.masked_moments(advantages, mask))
        elif h.advantage == "reinforce":
            advantages = reinforce(token_rewards, mask, h.gamma)
        else:
            compared = rewards if reward_parts is None else reward_parts
            members, groups, lookup = rows.comparisons()
            metrics["frac_zero_std"] = 1.0 - float(has_nonzero_std(compared[members], groups)[lookup].float().mean())
            if rows.turns is not None:
                _, group, sizes = groups.unique(return_inverse=True, return_counts=True)
                metrics["frac_alone"] = float((sizes[group][lookup] == 1).float().mean())
            if reward_parts is not None:
                advantages = gdpo(reward_parts, rows.groups, h.gdpo_weights, mask)
            else:
                totals = scaled if h.kl_in_loss else token_rewards.sum(1)
                advantages = GROUP_ESTIMATORS[h.advantage](totals[members], groups)[lookup].unsqueeze(1) * mask
        return Estimates(rewards=rewards, kl=kl, advantages=advantages, returns=returns), metrics

    def update_kl_coef(self, kl: Tensor) -> None:
        """Adapts the KL coefficient to the KL `[B, R]` of an update's responses, if there is a `kl_target`."""
        h, count = self.hyperparameters, len(kl)
        if h.kl_target is not None:
            mean = float(kl.sum()) / count
            self.kl_coef = token_ppo.adapt_kl_coef(self.kl_coef, mean, h.kl_target, count, h.kl_horizon)

    def state(self) -> dict[str, Any]:
        """The state as plain data."""
        return {"kl_coef": self.kl_coef, "reward_moments": asdict(self.reward_moments)}

    def load(self, state: dict[str, Any]) -> None:
        """Restores what `state` returned.

        Without `kl_target` the KL coefficient comes from the hyperparameters instead, so a clone in
        population-based training uses its own.
        """
        if self.hyperparameters.kl_target is not None:
            self.kl_coef = state["kl_coef"]
        self.reward_moments = RewardMoments(**state["reward_moments"])


def _values(rows: Rows) -> Tensor:
    assert isinstance(rows, ScoredRows) and rows.values is not None, "scored with a critic"
    return rows.values
