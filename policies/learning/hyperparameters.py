"""Hyperparameters of learning: one policy's, and those of credit assignment."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

Advantage = Literal["gae", "rloo", "grpo", "dr_grpo", "gdpo", "reinforce"]
RewardScope = Literal["all", "last"]
KLEstimator = Literal["full", "k1", "k3"]
Loss = Literal["ppo", "gspo", "cispo"]
OldLogprobs = Literal["learner", "sampler"]
ImportanceSamplingMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
Overlong = Literal["keep", "mask", "penalty"]


class Credit(NamedTuple):
    """Credit assignment; the settings of the same names."""

    credit: str
    partner_reward: float
    chain_gamma: float
    chain_lam: float
    reward_scope: RewardScope
    custom_function: Callable[..., object] | None  # the user's credit function, if `credit` names one
    stages: tuple[int, ...]
    """By position, the first position of the drafts that it belongs to (`Position.stage`); empty: no drafts."""


@dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters of one policy: the settings of the same names, which `policies.settings.fields` documents."""

    lr: float
    lr_schedule: Literal["constant", "linear", "cosine"]
    warmup_updates: int
    num_updates: int
    weight_decay: float
    num_epochs: int
    steps: int  # mini-batches per epoch
    micro_batch_size: int
    micro_batch_tokens: int | None
    offload_optimizer: bool
    seed: int
    advantage: Advantage
    gamma: float
    lam: float
    old_logprobs: OldLogprobs
    loss: Loss
    clip_ratio: float | None
    clip_ratio_high: float | None
    dual_clip: float | None
    entropy_coef: float
    importance_sampling_mode: ImportanceSamplingMode
    importance_sampling_clip_max: float | None
    importance_sampling_clip_min: float | None
    value_clip: float
    value_coef: float
    grad_clip: float | None
    kl_coef: float
    kl_estimator: KLEstimator
    kl_target: float | None
    kl_horizon: int
    reward_scaling: Literal["none", "scale", "normalize"]
    gdpo_weights: tuple[float, ...]  # with `gdpo`, the weight of each reward function
    overlong: Overlong
    overlong_buffer: int | None
    overlong_penalty: float
    response_limits: tuple[int, ...]  # by position, the maximum length of a response, in tokens

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
    def scores_policy(self) -> bool:
        """Whether a policy scores its responses before it trains on them, for the sake of the old log-probabilities."""
        return self.old_logprobs == "learner" and not self.single_pass

    @property
    def single_pass(self) -> bool:
        """Whether old log-probabilities are those of the training pass itself, in updates of a single optimizer step.

        A critic and a KL in the reward need a pass before it.
        """
        needed = self.critic or (self.kl_coef > 0 and not self.kl_in_loss)
        return self.old_logprobs == "learner" and self.num_epochs * self.steps == 1 and not needed

    @property
    def clip_range(self) -> tuple[float, float]:
        """The clip range of the ratio below and above 1: `clip_ratio` and `clip_ratio_high`, or the loss's default."""
        low, high = {"ppo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}[self.loss]
        if self.clip_ratio is not None:
            low = high = self.clip_ratio
        return low, high if self.clip_ratio_high is None else self.clip_ratio_high

    @property
    def loss_metrics(self) -> tuple[str, ...]:
        """Names of the terms of the loss that are reported."""
        has_weights = self.importance_sampling_clip_max is not None
        optional = {
            "dual_clip_fraction": self.dual_clip is not None,
            "importance_sampling_frac_high": has_weights,
            "importance_sampling_frac_low": has_weights and self.importance_sampling_clip_min is not None,
            "value_loss": self.critic,
        }
        return ("policy_loss", "clip_fraction", *(name for name, reported in optional.items() if reported))
