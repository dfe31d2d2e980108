"""Health: watches a run for the ways in which RL fine-tuning is known to fail (paper §1, §5), and says why it warns.

| signature       | of      | shows as                                                                               |
|-----------------|---------|----------------------------------------------------------------------------------------|
| `repetition`    | policy  | responses repeat their own words: the distribution has collapsed                       |
| `eos`           | policy  | the end-of-sequence rate has fallen far below that of the first update: endless text;  |
|                 |         | not with `min_response_tokens`, which changes the rate by itself                       |
| `kl`            | policy  | KL to the reference per token beyond its limit: the language of the base model is lost |
| `dragged_down`  | role    | a later role does worse than the pioneer, whose response it sees: it is misled by it   |
| `one_sided`     | role    | one role earns far more than another: it takes all the reward                          |

The first three are collapse. A signature that holds for `health_patience` updates in a row is a warning until it ends.
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
"""Standard errors by which a figure may be off by chance."""
LEAST_EOS = 0.05
"""A first end-of-sequence rate below this says nothing when it falls."""


class Sign(NamedTuple):
    """One signature that was found in an update."""

    signature: str
    subject: str
    """A policy or a role."""
    text: str
    """What was found, with its figures and its setting."""


class Health:
    """Remembers the first update and for how long each signature has held; `state` is all of that."""

    def __init__(self, settings: Settings) -> None:
        """Takes the limits from the settings."""
        self.settings = settings
        self.state: dict[str, Any] = {"first_eos_rate": {}, "held": {}}

    def observe(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        """Takes an update's report: of `Cory`'s, its `update`, `policy` and `role`. A warning that is new is logged.

        Returns:
            The warnings that stand: `signature`, `subject`, `text` and `updates`, for how many in a row it has held.
        """
        first = self.state["first_eos_rate"]
        for policy_id, figures in report["policy"].items():
            first.setdefault(policy_id, figures["eos_rate"])
        found = {f"{sign.signature}/{sign.subject}": sign for sign in self._signs(report)}
        held = {key: self.state["held"].get(key, 0) + 1 for key in found}
        self.state["held"] = held
        patience = self.settings.health_patience
        warnings = [{**found[key]._asdict(), "updates": count} for key, count in held.items() if count >= patience]
        for warning in warnings:
            if warning["updates"] == patience:
                logger.warning("Update %d: %s", report["update"], warning["text"])
        return warnings

    def _signs(self, report: dict[str, Any]) -> Iterator[Sign]:
        for policy_id, figures in report["policy"].items():
            first = self.state["first_eos_rate"][policy_id]
            yield from signs_of_collapse(self.settings, policy_id, figures, first, self.settings.responses)
        yield from self._signs_of_roles(report["role"])

    def _signs_of_roles(self, roles: dict[str, dict[str, float]]) -> Iterator[Sign]:
        s = self.settings
        (pioneer, leading), *later = roles.items()
        for role, figures in later:
            gap = effect_size(figures, leading)
            if abs(gap) * math.sqrt(s.chains / 2) < CHANCE:
                continue
            means = f"task reward {figures['task_reward']:.2f} against {leading['task_reward']:.2f}"
            rewards = f"{means}, {abs(gap):.1f} standard deviations"
            if s.knowledge_transfer and gap < -s.max_observer_deficit:
                yield Sign(
                    "dragged_down",
                    role,
                    f"The {role} does worse than the {pioneer} before it ({rewards}; max_observer_deficit is "
                    f"{s.max_observer_deficit:g}): the reference misleads it.",
                )
            if abs(gap) > s.max_role_gap:
                yield Sign(
                    "one_sided",
                    role,
                    f"The {role if gap > 0 else pioneer} takes all the reward ({role}: {rewards}; max_role_gap is "
                    f"{s.max_role_gap:g}). With a short exchange_period both learn both roles.",
                )


def signs_of_collapse(
    settings: Settings, policy_id: str, figures: Mapping[str, float], first_eos_rate: float, responses: int
) -> Iterator[Sign]:
    """Yields the signs of collapse that a policy shows.

    Args:
        settings: the limits.
        policy_id: the policy.
        figures: means over its responses.
        first_eos_rate: its end-of-sequence rate at the start of training.
        responses: of which rates are; of the fewest, where they are not all of as many.
    """
    if figures["repetition"] > settings.max_repetition:
        yield Sign(
            "repetition",
            policy_id,
            f"{policy_id} repeats itself: {figures['repetition']:.0%} of its token pairs stand earlier in the same "
            f"response (max_repetition is {settings.max_repetition:.0%}).",
        )
    now, share = figures["eos_rate"], settings.min_eos_ratio
    by_chance = CHANCE * math.sqrt(first_eos_rate * (1 - first_eos_rate) / responses)
    fallen = now < min(share * first_eos_rate, first_eos_rate - by_chance)
    if settings.min_response_tokens is None and first_eos_rate >= LEAST_EOS and fallen:
        yield Sign(
            "eos",
            policy_id,
            f"{policy_id} hardly ends its responses any more: {now:.0%} end with the end-of-sequence token, "
            f"{first_eos_rate:.0%} did at first (min_eos_ratio is {share:.0%} of that).",
        )
    token_kl = figures["kl"] / max(figures["response_length"], 1.0)
    if token_kl > settings.max_token_kl:
        yield Sign(
            "kl",
            policy_id,
            f"{policy_id} is far from its initial policy: KL {token_kl:.2f} nats per token (max_token_kl is "
            f"{settings.max_token_kl:g}). A larger kl_coef or a smaller lr holds it back.",
        )


def effect_size(one: dict[str, float], other: dict[str, float]) -> float:
    """Cohen's d of two roles' task rewards: difference of the means in pooled standard deviations; may be infinite."""
    difference = one["task_reward"] - other["task_reward"]
    pooled = math.sqrt((one["task_reward_std"] ** 2 + other["task_reward_std"] ** 2) / 2)
    if pooled == 0.0:
        return 0.0 if difference == 0.0 else math.copysign(math.inf, difference)
    return difference / pooled
