"""Hyperparameters of learning: one policy's, and those of credit assignment."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

Advantage = Literal["gae", "rloo", "grpo", "dr_grpo", "gdpo", "reinforce"]
RewardScope = Literal["all", "last"]
KLEstimator = Literal["full", "k1", "k3"]
Loss = Literal["ppo", "gspo", "cispo"]
ImportanceSamplingMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "none"]
Overlong = Literal["keep", "mask", "penalty"]


class Credit(NamedTuple):
    """Credit assignment; the settings of the same names."""

    credit: str = "sum"
    partner_reward: float = 1.0
    chain_gamma: float = 1.0
    chain_lam: float = 1.0
    reward_scope: RewardScope = "all"
    custom_function: Callable[..., object] | None = None
    """The user's credit function, if `credit` names one."""
    stages: tuple[int, ...] = ()
    """By position, the first position of the drafts that it belongs to (`Position.stage`); empty: no drafts."""


@dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters of one policy: settings of the same names, with the paper's values as defaults.

    `policies.settings.fields` documents each.
    """

    lr: float = 1.41e-5
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_updates: int = 0
    num_updates: int = 100
    weight_decay: float = 0.0
    num_epochs: int = 4
    steps: int = 1
    """Mini-batches per epoch."""
    micro_batch_size: int = 64
    micro_batch_tokens: int | None = None
    offload_optimizer: bool = False
    seed: int = 0
    advantage: Advantage = "gae"
    gamma: float = 1.0
    lam: float = 0.95
    loss: Loss = "ppo"
    clip_ratio: float | None = None
    clip_ratio_high: float | None = None
    dual_clip: float | None = None
    cispo_clip_max: float = 5.0
    cispo_clip_min: float | None = None
    entropy_coef: float = 0.0
    importance_sampling_mode: ImportanceSamplingMode = "token_truncate"
    importance_sampling_clip_max: float | None = None
    importance_sampling_clip_min: float | None = None
    value_clip: float = 0.2
    value_coef: float = 0.1
    grad_clip: float | None = 1.0
    kl_coef: float = 0.3
    kl_estimator: KLEstimator = "k1"
    kl_control: Literal["fixed", "adaptive"] = "fixed"
    kl_target: float = 6.0
    kl_horizon: int = 10000
    reward_scaling: Literal["none", "scale", "normalize"] = "none"
    gdpo_weights: tuple[float, ...] = ()
    """With `gdpo`, the weight of each reward function."""
    overlong: Overlong = "keep"
    overlong_buffer: int | None = None
    overlong_penalty: float = 1.0
    response_limits: tuple[int, ...] = ()
    """By position, the maximum length of a response, in tokens."""
    loss_weights: tuple[float, ...] = ()
    """By position in the chain, the weight of the loss; empty: 1 everywhere."""
    role_kl_coefs: tuple[float | None, ...] = ()
    """By position, the role's own KL coefficient; None: the policy's."""

    def lr_at(self, update: int) -> float:
        """The learning rate of an update, counted from 0.

        Linear warmup over the first `warmup_updates` updates; then `lr_schedule`, which reaches 0 after the last one.
        """
        if update < self.warmup_updates:
            return self.lr * (update + 1) / (self.warmup_updates + 1)
        progress = min((update - self.warmup_updates) / max(self.num_updates - self.warmup_updates, 1), 1.0)
        if self.lr_schedule == "linear":
            return self.lr * (1.0 - progress)
        if self.lr_schedule == "cosine":
            return self.lr * 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.lr

    @property
    def critic(self) -> bool:
        """Whether there is a value head."""
        return self.advantage == "gae"

    @property
    def kl_in_loss(self) -> bool:
        """Whether the KL penalty is a term of the loss instead of the reward."""
        return self.advantage in ("grpo", "dr_grpo", "gdpo")

    @property
    def clip_range(self) -> tuple[float, float]:
        """The clip range of the ratio below and above 1: `clip_ratio` and `clip_ratio_high`, or the loss's default."""
        low, high = (3e-4, 4e-4) if self.loss == "gspo" else (0.2, 0.2)
        if self.clip_ratio is not None:
            low = high = self.clip_ratio
        return low, high if self.clip_ratio_high is None else self.clip_ratio_high

    @property
    def importance_sampling(self) -> bool:
        """Whether tokens are weighted by the learner's / the sampler's probability."""
        return self.importance_sampling_mode != "none" and self.importance_sampling_clip_max is not None

    @property
    def loss_metrics(self) -> tuple[str, ...]:
        """Names of the terms of the loss that are reported."""
        optional = {
            "dual_clip_fraction": self.dual_clip is not None,
            "importance_sampling_frac_high": self.importance_sampling,
            "importance_sampling_frac_low": self.importance_sampling and self.importance_sampling_clip_min is not None,
            "value_loss": self.critic,
        }
        return ("policy_loss", "clip_fraction", *(name for name, reported in optional.items() if reported))
