"""From what responses were paid to the advantages that are learned from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from policies.learning import token_ppo
from policies.learning.advantages import GROUPED, has_nonzero_std, mean_of_others, reinforce
from policies.learning.hyperparameters import Hyperparameters
from policies.learning.rows import Rows, take


@dataclass
class RewardMoments:
    """Running mean and variance of the training rewards (parallel Welford); the first batch is exactly z-scored."""

    mean: float = 0.0
    variance: float = 1.0
    count: float = 1e-24

    def update(self, paid: Tensor) -> tuple[float, float]:
        """Adds a batch, `[B]`, and returns its own mean and unbiased standard deviation."""
        count, mean_sum, squares = token_ppo.masked_moments(paid, torch.ones_like(paid)).tolist()
        batch_mean = mean_sum / count
        batch_variance = max(squares / count - batch_mean**2, 0.0)
        delta, both = batch_mean - self.mean, self.count + count
        spread = self.variance * self.count + batch_variance * count + delta**2 * self.count * count / both
        self.mean += delta * count / both
        self.variance = spread / both
        self.count = both
        return batch_mean, (batch_variance * count / max(count - 1.0, 1.0)) ** 0.5

    @property
    def deviation(self) -> float:
        """Unbiased running standard deviation; 0 before there are two rewards."""
        return (self.variance * self.count / (self.count - 1.0)) ** 0.5 if self.count >= 2 else 0.0

    def scale(self, paid: Tensor, mode: Literal["none", "scale", "normalize"]) -> Tensor:
        """Divides by the running deviation; `normalize` subtracts the running mean first; `[B]` → `[B]`.

        Rewards that have all been equal so far have no scale, so nothing is divided.
        """
        if mode == "none":
            return paid
        shifted = paid - self.mean if mode == "normalize" else paid
        if self.deviation <= 1e-6 * max(abs(self.mean), 1.0):
            return shifted
        return shifted / (self.deviation + torch.finfo(torch.float32).eps)


def nonzero_std(rows: Rows) -> Rows:
    """The rows that were paid otherwise than another one of their group."""
    return take(rows, has_nonzero_std(rows["rewards"], rows["groups"]).nonzero().squeeze(1))


class Estimation:
    """Estimates the advantages of one LLM's responses, over the whole batch of an update.

    It remembers the KL coefficient, where a controller steers it, and the moments by which training rewards are scaled.
    """

    def __init__(self, hyperparameters: Hyperparameters) -> None:
        """Starts with the coefficient of the settings, and no rewards seen."""
        self.hyperparameters = hyperparameters
        self.forget()

    def forget(self) -> None:
        """Starts anew."""
        self.kl_coef = self.hyperparameters.kl_coef
        self.reward_moments = RewardMoments()

    def _kl(self, rows: Rows) -> Tensor:
        """The KL to the reference at each token of scored rows, by the estimator of the settings; `[B, R]`."""
        h = self.hyperparameters
        if h.kl_estimator == "full":
            return rows["full_kl"]
        return token_ppo.sampled_kl(rows["logprobs"], rows["reference_logprobs"], h.kl_estimator) * rows["mask"]

    def value_and_return(self, rows: Rows, paid: Tensor) -> tuple[Tensor, Tensor]:
        """What was to be expected before each response's first token, and what came from there on.

        Args:
            rows: scored.
            paid: what each response was paid, `[B]`.

        Returns:
            The critic's value, 0 where there is none; and the λ-return, without a critic the sum. `[B]` each.
        """
        h, mask = self.hyperparameters, rows["mask"]
        if h.kl_in_loss:
            return torch.zeros_like(paid), paid
        rewards = token_ppo.token_rewards(paid, self._kl(rows), mask, self.kl_coef)
        values = rows["values"] if h.critic else torch.zeros_like(rewards)
        _, returns = token_ppo.gae(rewards, values, mask, h.gamma, h.lam if h.critic else 1.0)
        return values[:, 0], returns[:, 0]

    def estimate(self, rows: Rows) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Estimates the advantages of an update's responses.

        Args:
            rows: all of the LLM's, scored; their `rewards` are what each response was paid.

        Returns:
            The columns `kl` and `advantages`, with a critic `returns` too, `[B, R]` each; and what is reported:
            `kl_coef` (that they were estimated with), `credited_reward`, with a critic `explained_variance`, by groups
            `frac_zero_std`, the share of responses whose group was all paid alike.
        """
        h, mask, kl = self.hyperparameters, rows["mask"], self._kl(rows)
        credited_reward, _ = self.reward_moments.update(rows["rewards"])
        paid = self.reward_moments.scale(rows["rewards"], h.reward_scaling)
        figures = {"kl_coef": self.kl_coef, "credited_reward": credited_reward}
        rewards = token_ppo.token_rewards(paid, kl, mask, self.kl_coef)
        if h.critic:
            advantages, returns = token_ppo.gae(rewards, rows["values"], mask, h.gamma, h.lam)
            if h.group_baseline:
                luck = mean_of_others(advantages[:, 0], rows["groups"])
                advantages = advantages - h.group_baseline * luck.unsqueeze(1) * mask
            advantages = token_ppo.whiten(advantages, mask, token_ppo.masked_moments(advantages, mask))
            figures["explained_variance"] = token_ppo.explained_variance(rows["values"], returns, mask)
            return {"kl": kl, "advantages": advantages, "returns": returns}, figures
        if h.advantage == "reinforce":
            return {"kl": kl, "advantages": reinforce(rewards, mask, h.gamma)}, figures
        figures["frac_zero_std"] = 1.0 - float(has_nonzero_std(rows["rewards"], rows["groups"]).float().mean())
        compared = GROUPED[h.advantage](paid if h.kl_in_loss else rewards.sum(1), rows["groups"])
        return {"kl": kl, "advantages": compared.unsqueeze(1) * mask}, figures

    def adapt(self, kl: Tensor) -> None:
        """Moves the KL coefficient, where a controller steers it, by the KL `[B, R]` of an update's responses."""
        h, count = self.hyperparameters, len(kl)
        if h.kl_control == "adaptive":
            mean = float(kl.sum()) / count
            self.kl_coef = token_ppo.adapt_kl_coef(self.kl_coef, mean, h.kl_target, count, h.kl_horizon)

    def state(self) -> dict[str, Any]:
        """All that it remembers, as plain data."""
        return {"kl_coef": self.kl_coef, "reward_moments": asdict(self.reward_moments)}

    def load(self, state: dict[str, Any]) -> None:
        """Restores what `state` returned; a coefficient that no controller steers stays that of the settings.

        So a clone of population-based training takes its own.
        """
        if self.hyperparameters.kl_control == "adaptive":
            self.kl_coef = state["kl_coef"]
        self.reward_moments = RewardMoments(**state["reward_moments"])
