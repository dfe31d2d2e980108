"""Advantage estimation: from the rewards of one policy's responses to the advantages that it trains on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from policies.learning import token_ppo
from policies.learning.advantages import GROUP_ESTIMATORS, gdpo, has_nonzero_std, reinforce
from policies.learning.hyperparameters import Hyperparameters
from policies.learning.rows import Rows, select_rows


@dataclass
class RewardMoments:
    """Running mean and variance of the training rewards, by the parallel Welford algorithm (Chan et al. 1979).

    With `reward_scaling=normalize` the first batch is exactly z-scored.
    """

    mean: float = 0.0
    variance: float = 1.0
    count: float = 1e-24

    def update(self, rewards: Tensor) -> tuple[float, float]:
        """Adds a batch of rewards `[B]`; returns the batch's mean and unbiased standard deviation."""
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
        return batch_mean, (batch_variance * count / max(count - 1.0, 1.0)) ** 0.5

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


def ended(rows: Rows) -> Rows:
    """Drops the rows that were cut at the length limit (`overlong=mask`)."""
    return select_rows(rows, rows["ended"].nonzero().squeeze(1))


def compared_rewards(rows: Rows) -> Tensor:
    """The credited rewards that are compared within groups: `[B]`, with `gdpo` `[B, K]` of K reward functions."""
    return rows.get("reward_parts", rows["rewards"])


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
        """The KL to the reference at each token of rows, by `kl_estimator`; `[B, R]`, 0 without reference scores."""
        h = self.hyperparameters
        if "reference_logprobs" not in rows:
            return torch.zeros_like(rows["mask"])
        if h.kl_estimator == "full":
            return rows["full_kl"]
        return token_ppo.sampled_kl(rows["logprobs"], rows["reference_logprobs"], h.kl_estimator) * rows["mask"]

    def value_and_return(self, rows: Rows, rewards: Tensor) -> tuple[Tensor, Tensor]:
        """The value V before each response's first token, and the return G from there.

        Args:
            rows: scored.
            rewards: reward of each response, `[B]`.

        Returns:
            V, `[B]`: the critic's value; 0 without a critic.
            G, `[B]`: the λ-return; without a critic the sum of the token rewards.
        """
        h, mask = self.hyperparameters, rows["mask"]
        if h.kl_in_loss:
            return torch.zeros_like(rewards), rewards
        token_rewards = token_ppo.token_rewards(rewards, self._kl(rows), mask, self.kl_coef)
        values = rows["values"] if h.critic else torch.zeros_like(token_rewards)
        _, returns = token_ppo.gae(token_rewards, values, mask, h.gamma, h.lam if h.critic else 1.0)
        return values[:, 0], returns[:, 0]

    def estimate(self, rows: Rows) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Estimates the advantages of an update's responses.

        Args:
            rows: all rows of the policy, scored, with `rewards` from `assign_credit`.

        Returns:
            The columns `kl` and `advantages`, and with a critic `returns`, `[B, R]` each; and `rewards`, `[B]`, with
            the penalty of `overlong=penalty`.
            The metrics `kl_coef` (the one used here) and `credited_reward`; with a critic `explained_variance`; with a
            group estimator `frac_zero_std`, the share of responses in zero-variance groups; with `overlong=penalty` the
            mean `overlong_penalty`.
        """
        columns, metrics = {name: rows[name] for name in ("rewards", "reward_parts") if name in rows}, {}
        if self.hyperparameters.overlong == "penalty":
            penalties = self._overlong_penalties(rows)
            columns["rewards"] = rows["rewards"] + penalties
            metrics["overlong_penalty"] = float(penalties.mean())
        estimated, estimator_metrics = self._estimate(rows | columns)
        return columns | estimated, metrics | estimator_metrics

    def _overlong_penalties(self, rows: Rows) -> Tensor:
        h = self.hyperparameters
        assert h.overlong_buffer is not None
        limits = torch.tensor(h.response_limits)[rows["positions"]]
        return token_ppo.overlong_penalty(rows["mask"].sum(1), limits, h.overlong_buffer, h.overlong_penalty)

    def _estimate(self, rows: Rows) -> tuple[dict[str, Tensor], dict[str, float]]:
        h, mask, kl = self.hyperparameters, rows["mask"], self._kl(rows)
        credited_reward, _ = self.reward_moments.update(rows["rewards"])
        rewards = self.reward_moments.scale(rows["rewards"], h.reward_scaling)
        metrics = {"kl_coef": self.kl_coef, "credited_reward": credited_reward}
        token_rewards = token_ppo.token_rewards(rewards, kl, mask, self.kl_coef)
        if h.critic:
            advantages, returns = token_ppo.gae(token_rewards, rows["values"], mask, h.gamma, h.lam)
            advantages = token_ppo.whiten(advantages, mask, token_ppo.masked_moments(advantages, mask))
            metrics["explained_variance"] = token_ppo.explained_variance(rows["values"], returns, mask)
            return {"kl": kl, "advantages": advantages, "returns": returns}, metrics
        if h.advantage == "reinforce":
            return {"kl": kl, "advantages": reinforce(token_rewards, mask, h.gamma)}, metrics
        metrics["frac_zero_std"] = 1.0 - float(has_nonzero_std(compared_rewards(rows), rows["groups"]).float().mean())
        if h.advantage == "gdpo":
            advantages = gdpo(rows["reward_parts"], rows["groups"], h.gdpo_weights, mask)
            return {"kl": kl, "advantages": advantages}, metrics
        advantages = GROUP_ESTIMATORS[h.advantage](rewards if h.kl_in_loss else token_rewards.sum(1), rows["groups"])
        return {"kl": kl, "advantages": advantages.unsqueeze(1) * mask}, metrics

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
