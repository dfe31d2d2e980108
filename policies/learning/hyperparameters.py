"""What learning depends on, beside rows and weights."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Advantage = Literal["gae", "rloo", "grpo", "dr_grpo", "reinforce"]
Rewarded = Literal["all", "last"]
KLEstimator = Literal["full", "k1", "k3"]


class Credit(NamedTuple):
    """Who of a chain is paid for what; the settings of the same names."""

    credit: Literal["sum", "chain"] = "sum"
    partner_reward: float = 1.0
    chain_gamma: float = 1.0
    chain_lam: float = 1.0
    rewarded: Rewarded = "all"


@dataclass(frozen=True)
class Hyperparameters:
    """What one LLM's learning depends on: settings of the same names, with the paper's values as defaults.

    `policies.settings.fields` says what each means.
    """

    lr: float = 1.41e-5
    epochs: int = 4
    steps: int = 1
    """Mini-batches per epoch."""
    micro_batch: int = 64
    seed: int = 0
    advantage: Advantage = "gae"
    gamma: float = 1.0
    lam: float = 0.95
    clip: float = 0.2
    value_clip: float = 0.2
    value_coef: float = 0.1
    grad_clip: float | None = 1.0
    kl_coef: float = 0.3
    kl_estimator: KLEstimator = "k1"
    kl_control: Literal["fixed", "adaptive"] = "fixed"
    kl_target: float = 6.0
    kl_horizon: int = 10000
    score_scaling: Literal["none", "scale", "normalize"] = "none"

    @property
    def critic(self) -> bool:
        """Whether there is a value head."""
        return self.advantage == "gae"

    @property
    def kl_in_loss(self) -> bool:
        """Whether the KL penalty is a term of the loss, instead of the reward."""
        return self.advantage in ("grpo", "dr_grpo")
