"""Health checks: detect known failures of RL fine-tuning (paper §1, §5) during a run, and explain each warning.

| signature       | subject | symptom                                                                                |
|-----------------|---------|----------------------------------------------------------------------------------------|
| `repetition`    | policy  | responses repeat their own words: the distribution has collapsed                       |
| `eos`           | policy  | the end-of-sequence rate is far below that of the first update: endless text; not      |
|                 |         | checked with `min_response_tokens`, which changes the rate                             |
| `kl`            | policy  | KL to the reference per token above its limit: the language of the base model is lost  |
| `dragged_down`  | role    | a later role has lower rewards than the pioneer: the reference misleads it             |
| `one_sided`     | role    | one role has far higher rewards than another                                           |
| `all_masked`    | policy  | all responses were cut at the length limit, and `overlong=mask` drops such responses   |
| `no_signal`     | policy  | all compared responses have equal rewards, or the gradient is 0: nothing is learned    |

The first three mean collapse. A signature that lasts for `health_patience` consecutive updates is a warning until it
ends. If chains stop in training (`stop_in_training`), later roles answer only what was not solved before, so roles are
not compared.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from policies.settings.settings import Settings

logger = logging.getLogger(__name__)

COLLAPSE = ("repetition", "eos", "kl")
CHANCE = 3.0
"""Standard errors within which a difference counts as chance."""
ZERO_STD_TOLERANCE = 1e-6
"""Standard deviation up to which rewards count as equal."""
MIN_FIRST_EOS_RATE = 0.05
"""If the first end-of-sequence rate is below this, a lower one is not a sign."""


class HealthSign(NamedTuple):
    """A sign of failure in one update."""

    signature: str
    subject: str
    """A policy or a role."""
    text: str
    """Message with the values and the setting that limits them."""


class Health:
    """Detects signs over the updates of a run.

    `state` holds the first update's end-of-sequence rates, and for how many updates each sign has lasted.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.state: dict[str, Any] = {"first_eos_rate": {}, "held": {}}

    def observe(self, report: dict[str, Any], responses: Mapping[str, int]) -> list[dict[str, Any]]:
        """Checks an update's report, and logs new warnings.

        Args:
            report: `Cory`'s; only `update`, `policy`, `role`, and with `Settings.roles` `roles` are used.
            responses: policy id → number of its responses in the update; policies without responses may be absent.

        Returns:
            The active warnings: `signature`, `subject`, `text`, and `updates`, the number of consecutive updates.
        """
        first = self.state["first_eos_rate"]
        for policy_id, metrics in report["policy"].items():
            if not math.isnan(metrics["eos_rate"]):
                first.setdefault(policy_id, metrics["eos_rate"])
        signs = {f"{sign.signature}/{sign.subject}": sign for sign in self._signs(report, responses)}
        counts = {key: self.state["held"].get(key, 0) + 1 for key in signs}
        self.state["held"] = counts
        patience = self.settings.health_patience
        warnings = [{**signs[key]._asdict(), "updates": count} for key, count in counts.items() if count >= patience]
        for warning in warnings:
            if warning["updates"] == patience:
                logger.warning("Update %d: %s", report["update"], warning["text"])
        return warnings

    def _signs(self, report: dict[str, Any], responses: Mapping[str, int]) -> Iterator[HealthSign]:
        s = self.settings
        for policy_id, metrics in report["policy"].items():
            first = self.state["first_eos_rate"].get(policy_id, math.nan)
            yield from collapse_signs(s, policy_id, metrics, first, responses.get(policy_id, 0))
            if s.overlong == "mask" and metrics["eos_rate"] == 0.0:
                yield HealthSign(
                    "all_masked",
                    policy_id,
                    f"{policy_id} learns nothing: all its responses were cut at the length limit, and overlong=mask "
                    "leaves such responses out of the loss. Raise max_response_tokens, or set overlong=keep.",
                )
            elif responses.get(policy_id) and (cause := self._no_signal(policy_id, metrics, report)):
                yield HealthSign("no_signal", policy_id, f"{policy_id} learns nothing from its rewards: {cause}")
        yield from self._role_signs(report["role"])

    def _no_signal(self, policy_id: str, metrics: Mapping[str, float], report: dict[str, Any]) -> str | None:
        """Returns why a policy learned nothing from the rewards of its responses; None if it may have learned."""
        s = self.settings
        if s.roles is not None:
            weights = zip(report["roles"].values(), s.loss_weights, strict=True)
            if not any(weight for role_policy, weight in weights if role_policy == policy_id):
                return None  # as set by the user
        if metrics.get("frac_zero_std", float(self._rewards_are_constant(report["role"]))) == 1.0:
            return (
                "all the responses that are compared with one another got the same reward. Check the reward, or use "
                "queries that the model neither always nor never solves."
            )
        if metrics.get("grad_norm") == 0.0:
            return (
                "its gradient is 0. The responses that differ in reward are left out of the loss (overlong=mask), or "
                "their role's loss_weight is 0."
            )
        return None

    def _rewards_are_constant(self, roles: Mapping[str, Mapping[str, float]]) -> bool:
        """Whether each role's rewards are all equal, and so are those that it trains on (without groups)."""
        s = self.settings
        if s.stop_in_training or s.overlong == "penalty" or ":" in s.credit:
            return False
        stds = [metrics["task_reward_std"] for metrics in roles.values() if not math.isnan(metrics["task_reward"])]
        return bool(stds) and max(stds) <= ZERO_STD_TOLERANCE

    def _role_signs(self, roles: dict[str, dict[str, float]]) -> Iterator[HealthSign]:
        s = self.settings
        comparable = {p.agent for p in s.positions if p.role.has_reward and p.role.own_reward is None}
        if len(comparable) < 2 or s.stop_in_training:
            return
        (pioneer, pioneer_metrics), *later = (item for item in roles.items() if item[0] in comparable)
        for role, metrics in later:
            effect = effect_size(metrics, pioneer_metrics)
            if abs(effect) * math.sqrt(s.chains / 2) < CHANCE:
                continue
            means = f"task reward {metrics['task_reward']:.2f} vs. {pioneer_metrics['task_reward']:.2f}"
            rewards = f"{means}, {abs(effect):.1f} standard deviations"
            if s.knowledge_transfer and effect < -s.max_observer_deficit:
                yield HealthSign(
                    "dragged_down",
                    role,
                    f"The {role} has lower rewards than the {pioneer} ({rewards}; max_observer_deficit is "
                    f"{s.max_observer_deficit:g}): the reference misleads it.",
                )
            if abs(effect) > s.max_role_gap:
                yield HealthSign(
                    "one_sided",
                    role,
                    f"The {role if effect > 0 else pioneer} has far higher rewards ({role}: {rewards}; max_role_gap is "
                    f"{s.max_role_gap:g}). With a shorter exchange_period both LLMs learn both roles.",
                )


def collapse_signs(
    settings: Settings, policy_id: str, metrics: Mapping[str, float], first_eos_rate: float, responses: int
) -> Iterator[HealthSign]:
    """Yields a policy's signs of collapse.

    Args:
        settings: the limits.
        policy_id: the policy.
        metrics: means over its responses.
        first_eos_rate: its end-of-sequence rate at the start of training.
        responses: the number of its responses.
    """
    if metrics["repetition"] > settings.max_repetition:
        yield HealthSign(
            "repetition",
            policy_id,
            f"{policy_id} repeats itself: {metrics['repetition']:.0%} of its token pairs occur earlier in the same "
            f"response (max_repetition is {settings.max_repetition:.0%}).",
        )
    eos_rate, ratio = metrics["eos_rate"], settings.min_eos_ratio
    margin = CHANCE * math.sqrt(first_eos_rate * (1 - first_eos_rate) / max(responses, 1))
    has_fallen = eos_rate < min(ratio * first_eos_rate, first_eos_rate - margin)
    if settings.min_response_tokens is None and first_eos_rate >= MIN_FIRST_EOS_RATE and has_fallen:
        yield HealthSign(
            "eos",
            policy_id,
            f"{policy_id} rarely ends its responses: {eos_rate:.0%} end with the end-of-sequence token, "
            f"{first_eos_rate:.0%} at the start (min_eos_ratio is {ratio:.0%} of that).",
        )
    token_kl = metrics["kl"] / max(metrics["response_length"], 1.0)
    if token_kl > settings.max_token_kl:
        yield HealthSign(
            "kl",
            policy_id,
            f"{policy_id} is far from its initial policy: KL {token_kl:.2f} nats per token (max_token_kl is "
            f"{settings.max_token_kl:g}). Increase kl_coef or reduce lr.",
        )


def effect_size(first: dict[str, float], second: dict[str, float]) -> float:
    """Cohen's d of two roles' task rewards: difference of means in pooled standard deviations; may be infinite."""
    difference = first["task_reward"] - second["task_reward"]
    pooled = math.sqrt((first["task_reward_std"] ** 2 + second["task_reward_std"] ** 2) / 2)
    if pooled == 0.0:
        return 0.0 if difference == 0.0 else math.copysign(math.inf, difference)
    return difference / pooled
