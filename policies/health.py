"""Health checks: detect known failures of RL fine-tuning (paper §1, §5) during a run, and explain each warning.

| signature       | subject | symptom                                                                                |
|-----------------|---------|----------------------------------------------------------------------------------------|
| `repetition`    | policy  | responses repeat their own words far more than at first: the policy has collapsed      |
| `eos`           | policy  | the end-of-sequence rate is far below that of the first update: endless text; not      |
|                 |         | checked with `min_response_tokens`, which changes the rate                             |
| `kl`            | policy  | KL to the reference per token above its limit: the language of the base model is lost  |
| `kl_jump`       | policy  | KL to the reference per token rose in one update by more than half of that limit       |
| `dragged_down`  | role    | a later role has lower rewards than the pioneer: the reference misleads it             |
| `one_sided`     | role    | one role has far higher rewards than another                                           |
| `length_limit`  | role    | nearly all responses were cut at the length limit                                      |
| `no_signal`     | policy  | nothing is learned: all compared responses have equal rewards, the gradient is 0, or   |
|                 |         | all responses were cut at the length limit, and `overlong=mask` drops them             |

`repetition`, `eos` and `kl` mean collapse. A signature that lasts for `PATIENCE` consecutive updates is a
warning until it ends. `kl_jump`, `length_limit` and, in update 1, rewards that are all equal are warnings at once. If
chains stop in training (`stop_in_training`), later roles answer only what was not solved before, so roles are not
compared.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from cory_env.message import MESSAGES_RULE
from policies.settings.settings import Settings

logger = logging.getLogger(__name__)

COLLAPSE = ("repetition", "eos", "kl")
PATIENCE = 3  # consecutive updates after which most signs become a warning
CHANCE = 3.0  # standard errors within which a difference counts as chance
ZERO_STD_TOLERANCE = 1e-6  # standard deviation up to which rewards count as equal
OPEN_ENDED_TASKS = ("imdb",)  # whose responses continue a text, and need no end
# Limits (docs/faq.md), well outside the range of healthy runs.
MAX_REPETITION = 0.9  # of any text, unless the first update already repeats more
MAX_REPETITION_RISE = 0.2  # of the share of repeated token pairs since the first update, as texts may repeat by nature
MIN_FIRST_EOS_RATE = 0.05  # if the first end-of-sequence rate is below this, a lower one is not a sign
MIN_EOS_RATIO = 0.5  # smallest end-of-sequence rate, as a share of the first update's
MAX_CUT_RATE = 0.95  # from this share of responses at the length limit on, the limit is too low
MAX_TOKEN_KL = 2.0  # largest KL to the reference per response token, in nats
MAX_KL_RISE = 0.5  # of the KL per token in one update, as a share of `MAX_TOKEN_KL`
MAX_DEFICIT = 0.5  # standard deviations by which a later role's task reward may be below the pioneer's
MAX_ROLE_GAP = 2.0  # standard deviations by which the roles' task rewards may differ


class HealthSign(NamedTuple):
    """A sign of failure in one update."""

    signature: str
    subject: str
    """A policy or a role."""
    text: str
    """Message with the values and their limit."""
    immediate: bool = False
    """Whether it is a warning at once, without `PATIENCE`."""


class Health:
    """Detects signs over the updates of a run.

    `state` holds the first update's rates of each policy, its last KL per token, for how many updates each sign has
    lasted, and which of them are warnings. Checkpoints of earlier versions lack some of them.
    """

    def __init__(self, settings: Settings, *, has_conversations: bool = False) -> None:
        """Initializes the state of a new run.

        Args:
            has_conversations: whether queries are conversations, so that completions are lists of messages.
        """
        self.settings = settings
        self.has_conversations = has_conversations
        self.state: dict[str, Any] = {"first_eos_rate": {}, "held": {}, "active": []}

    def observe_start(self, report: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Checks the evaluation before training, and logs warnings; returns them as `observe` does.

        Args:
            report: `Evaluator.evaluate`'s.
        """
        roles = self.settings.agents
        alone = [metrics["eos_rate"] for metrics in report["evaluation"].values()]
        eos_rates = {roles[0]: min((rate for rate in alone if not math.isnan(rate)), default=math.nan)}
        if "last_response" in report and self.settings.stop_when is None:
            eos_rates[roles[-1]] = report["last_response"]["eos_rate"]
        return self._update_warnings(0, self._length_signs(eos_rates))

    def observe(self, report: dict[str, Any], responses: Mapping[str, int]) -> list[dict[str, Any]]:
        """Checks an update's report, and logs new warnings.

        Args:
            report: `Cory`'s; only `update`, `policy`, `role`, and with `Settings.roles` `roles` are used.
            responses: policy id → number of its responses in the update; policies without responses may be absent.

        Returns:
            The active warnings: `signature`, `subject`, `text`, and `updates`, the number of consecutive updates.
        """
        first_eos_rate, first_repetition, last_kl = (
            self.state.setdefault(name, {}) for name in ("first_eos_rate", "first_repetition", "token_kl")
        )
        signs: list[HealthSign] = []
        for policy_id, metrics in report["policy"].items():
            if not math.isnan(metrics["eos_rate"]):
                first_eos_rate.setdefault(policy_id, metrics["eos_rate"])
                first_repetition.setdefault(policy_id, metrics["repetition"])
            first = {
                "eos_rate": first_eos_rate.get(policy_id, math.nan),
                "repetition": first_repetition.get(policy_id, 0.0),
            }
            signs += collapse_signs(self.settings, policy_id, metrics, first, responses.get(policy_id, 0))
            if not math.isnan(kl := token_kl(metrics)):
                signs += self._kl_jump(policy_id, last_kl.get(policy_id, math.nan), kl)
                last_kl[policy_id] = kl
            if responses.get(policy_id) and (cause := self._no_signal(metrics, report["role"])):
                text = f"{policy_id} learns nothing from its rewards: {cause}"
                is_first = report["update"] == 1 and all_equal(report["role"])
                signs.append(HealthSign("no_signal", policy_id, text, is_first))
        signs += self._length_signs({role: m.get("eos_rate", math.nan) for role, m in report["role"].items()})
        signs += self._role_signs(report["role"])
        return self._update_warnings(report["update"], signs)

    def _update_warnings(self, update: int, signs: Iterable[HealthSign]) -> list[dict[str, Any]]:
        """Counts the updates of each sign, logs those that become warnings, and returns all warnings."""
        by_key = {f"{sign.signature}/{sign.subject}": sign for sign in signs}
        counts = {key: self.state["held"].get(key, 0) + (update > 0) for key in by_key}
        previous = self.state.get("active", [])
        active = [key for key, sign in by_key.items() if sign.immediate or key in previous or counts[key] >= PATIENCE]
        self.state |= {"held": counts, "active": active}
        for key in active:
            if key not in previous:
                logger.warning("Update %d: %s", update, by_key[key].text)
        shown = {key: by_key[key] for key in active}
        return [
            {"signature": sign.signature, "subject": sign.subject, "text": sign.text, "updates": counts[key]}
            for key, sign in shown.items()
        ]

    def _kl_jump(self, policy_id: str, before: float, kl: float) -> Iterator[HealthSign]:
        limit = MAX_KL_RISE * MAX_TOKEN_KL
        if kl - before > limit:  # False for NaN
            adapters = " or train adapters (weights=lora)" if self.settings.lora is None else ""
            text = (
                f"One update moved {policy_id} far from its initial policy: KL {before:.2f} -> {kl:.2f} nats per token "
                f"(it may rise by {limit:g}). Reduce lr, increase kl_coef{adapters}."
            )
            yield HealthSign("kl_jump", policy_id, text, immediate=True)

    def _length_signs(self, eos_rates: Mapping[str, float]) -> Iterator[HealthSign]:
        """Yields a sign for each role whose responses hardly ever end, from its end-of-sequence rate."""
        s = self.settings
        if s.task in OPEN_ENDED_TASKS or s.min_response_tokens is not None:
            return
        limits = dict(zip(s.agents, s.response_limits, strict=True))
        for role, eos_rate in eos_rates.items():
            if 1.0 - eos_rate >= MAX_CUT_RATE and limits[role] > 1:  # a single token is meant to be cut
                text = (
                    f"{1.0 - eos_rate:.0%} of the {role}'s responses are cut at the length limit, "
                    f"max_response_tokens={limits[role]}. Raise it, or ask for shorter responses in the prompt."
                )
                yield HealthSign("length_limit", role, text, immediate=True)

    def _no_signal(self, metrics: Mapping[str, float], roles: Mapping[str, Mapping[str, float]]) -> str | None:
        """Returns why a policy learned nothing; None if it may have learned.

        Without groups, credit assignment and penalties may make rewards that are equal in each role differ.
        """
        s = self.settings
        if s.overlong == "mask" and metrics["eos_rate"] == 0.0:
            return "all its responses were cut at max_response_tokens, and overlong=mask leaves them out. Raise it."
        is_constant = all_equal(roles) and not (s.stop_in_training or s.overlong == "penalty" or ":" in s.credit)
        if metrics.get("frac_zero_std", float(is_constant)) == 1.0:
            advice = "Check the reward, or use queries that the model neither always nor never solves."
            if not all_equal(roles):
                return f"all the responses that are compared with one another got the same reward. {advice}"
            rewards = ", ".join(
                f"{role} {m['task_reward']:g}" for role, m in roles.items() if not math.isnan(m["task_reward"])
            )
            rule = f" {MESSAGES_RULE}" if self.has_conversations else ""
            return f"all the responses of a role got the same reward ({rewards}). {advice}{rule}"
        if metrics.get("grad_norm") == 0.0:
            return "its gradient is 0. The responses that differ in reward are left out of the loss (overlong=mask)."
        return None

    def _role_signs(self, roles: dict[str, dict[str, float]]) -> Iterator[HealthSign]:
        s = self.settings
        comparable = {p.agent for p in s.positions if p.role.has_reward and p.role.own_reward is None}
        if len(comparable) < 2 or s.stop_in_training or s.reward_scope == "last":
            return
        advice = " With a shorter exchange_period both LLMs learn both roles." if len(s.policy_ids) > 1 else ""
        (pioneer, pioneer_metrics), *later = (item for item in roles.items() if item[0] in comparable)
        for role, metrics in later:
            effect = effect_size(metrics, pioneer_metrics)
            if abs(effect) * math.sqrt(s.chains / 2) < CHANCE:
                continue
            means = f"task reward {metrics['task_reward']:.2f} vs. {pioneer_metrics['task_reward']:.2f}"
            rewards = f"{means}, {abs(effect):.1f} standard deviations"
            if s.knowledge_transfer and effect < -MAX_DEFICIT:
                text = (
                    f"The {role} has lower rewards than the {pioneer} ({rewards}; up to {MAX_DEFICIT:g} are normal): "
                    "the reference misleads it."
                )
                yield HealthSign("dragged_down", role, text)
            if abs(effect) > MAX_ROLE_GAP:
                text = (
                    f"The {role if effect > 0 else pioneer} has far higher rewards ({role}: {rewards}; up to "
                    f"{MAX_ROLE_GAP:g} are normal).{advice}"
                )
                yield HealthSign("one_sided", role, text)


def collapse_signs(
    settings: Settings, policy_id: str, metrics: Mapping[str, float], first: Mapping[str, float], responses: int
) -> Iterator[HealthSign]:
    """Yields a policy's signs of collapse.

    Args:
        first: its `eos_rate` and `repetition` at the start of training.
    """
    repetition, eos_rate, first_eos_rate = metrics["repetition"], metrics["eos_rate"], first["eos_rate"]
    limit = min(first["repetition"] + MAX_REPETITION_RISE, max(first["repetition"], MAX_REPETITION))
    if repetition > limit:
        text = (
            f"{policy_id} repeats itself: {repetition:.0%} of its token pairs occur earlier in the same response "
            f"({first['repetition']:.0%} at the start; the limit is {limit:.0%})."
        )
        yield HealthSign("repetition", policy_id, text)
    margin = CHANCE * math.sqrt(first_eos_rate * (1 - first_eos_rate) / max(responses, 1))
    has_fallen = eos_rate < min(MIN_EOS_RATIO * first_eos_rate, first_eos_rate - margin)
    if settings.min_response_tokens is None and first_eos_rate >= MIN_FIRST_EOS_RATE and has_fallen:
        text = (
            f"{policy_id} rarely ends its responses: {eos_rate:.0%} end with the end-of-sequence token, "
            f"{first_eos_rate:.0%} at the start."
        )
        yield HealthSign("eos", policy_id, text)
    if (kl := token_kl(metrics)) > MAX_TOKEN_KL:
        text = (
            f"{policy_id} is far from its initial policy: KL {kl:.2f} nats per token (the limit is {MAX_TOKEN_KL:g}). "
            "Increase kl_coef or reduce lr."
        )
        yield HealthSign("kl", policy_id, text)


def token_kl(metrics: Mapping[str, float]) -> float:
    """KL to the reference per response token, in nats, estimated (`kl_k3`) if it is not known; NaN without any."""
    return metrics.get("kl_k3", metrics["kl"]) / max(metrics["response_length"], 1.0)


def all_equal(roles: Mapping[str, Mapping[str, float]]) -> bool:
    """Whether the task rewards of each role are all equal, as far as it has any."""
    stds = [metrics["task_reward_std"] for metrics in roles.values() if not math.isnan(metrics["task_reward"])]
    return bool(stds) and max(stds) <= ZERO_STD_TOLERANCE


def effect_size(first: dict[str, float], second: dict[str, float]) -> float:
    """Cohen's d of two roles' task rewards: difference of means in pooled standard deviations; may be infinite."""
    difference = first["task_reward"] - second["task_reward"]
    pooled = math.sqrt((first["task_reward_std"] ** 2 + second["task_reward_std"] ** 2) / 2)
    if pooled == 0.0:
        return 0.0 if difference == 0.0 else math.copysign(math.inf, difference)
    return difference / pooled
