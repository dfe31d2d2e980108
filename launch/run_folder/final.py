"""The last look at a run's policies, `final.json`: every response of each one, alone, to the first held-out queries,
and the chain's last answer to them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

from launch.console.errors import CommandError
from launch.run_folder.journal import replace_text
from launch.run_folder.records import plain

if TYPE_CHECKING:
    import numpy as np

    from policies.cory import Cory
    from policies.rollout.episodes import Rollout

PROBED = 200
"""Held-out queries, at most, on which the influence is measured: two responses of the pioneer to each, two to each of
these."""
OF_RESPONSE = ("task_reward", "kl", "combined_reward", "response_length", "eos_rate", "repetition")
"""What is measured of a response; `eos_rate` is 1 where it ended by itself, else 0."""


class Responses(TypedDict):
    """One policy's responses, an entry of each list per query."""

    query: list[int]
    """Numbers of held-out queries."""
    prompt: list[str]
    text: list[str]
    figures: dict[str, list[float | None]]
    """By the names in `OF_RESPONSE`."""


class FinalInfluence(TypedDict):
    """How much of the variance of the second agent's reward the pioneer's response explains (`policies.influence`)."""

    share: float | None
    """None where no reward varies."""
    low: float | None
    high: float | None
    """Ends of its 95 % interval."""
    queries: int


class Final(TypedDict):
    """What `final.json` holds."""

    update: int
    policy: dict[str, Responses]
    """A policy whose reward failed on every query is absent (`on_reward_error: skip`). With `evaluate_average` the LLM
    whose weights are the mean of the others' is one more."""
    last_answer: NotRequired[dict[str, Responses]]
    """Of the chain, by who plays it, such as `llm_1,llm_2`, in every order that role exchange brings. `kl` is to the
    reference on the bare query; the figures hold `seen_kl` too, to that in the last agent's prompt."""
    influence: NotRequired[FinalInfluence]
    """Of a chain whose agents see the earlier responses, on the first `PROBED` of these queries at most."""


def final_responses(algo: "Cory", count: int) -> Final:
    """Lets each policy answer held-out queries alone, and the chain, always the same ones with the same seeds.

    Args:
        algo: holds the policies.
        count: the first so many held-out queries, or all if there are fewer.
    """
    from policies.models.model_names import AVERAGE
    from policies.rollout.dealing import Deal

    deals = [Deal(query) for query in range(min(count, len(algo.task.test)))]
    final = Final(update=algo.updates, policy={})
    for module in algo.settings.modules:
        mapping = algo.evaluator.led_by(module)
        rollout, figures = algo.evaluator.measure(deals, mapping, "test")
        if not figures:
            continue
        final["policy"][module] = _of_role(rollout, figures, 0)
        if len(mapping.roles) > 1:
            order = ",".join(mapping.as_dict().values())
            final.setdefault("last_answer", {})[order] = _of_role(rollout, figures, len(mapping.roles) - 1)
    if algo.settings.evaluate_average:
        with algo.evaluator.average() as alone:
            rollout, figures = algo.evaluator.measure(deals, alone, "test")
        if figures:
            final["policy"][AVERAGE] = _of_role(rollout, figures, 0)
    if "last_answer" in final:
        final["influence"] = _influence(algo, min(count, PROBED))
    return final


def _influence(algo: "Cory", queries: int) -> FinalInfluence:
    from policies.influence import components, measure_influence, share_interval

    rewards = measure_influence(algo, queries).answer_rewards
    if len(rewards) < 2:
        return FinalInfluence(share=None, low=None, high=None, queries=len(rewards))
    low, high = share_interval(rewards)
    return FinalInfluence(share=components(rewards).share, low=low, high=high, queries=len(rewards))


def _of_role(rollout: "Rollout", figures: "Mapping[str, Mapping[str, np.ndarray]]", at: int) -> Responses:
    """Returns what the role at a position answered, and what was measured of it."""
    samples = rollout.samples
    measured = list(figures.values())[at]
    return Responses(
        query=[deal.query for deal in rollout.deals],
        prompt=[sample["query"] for sample in samples],
        text=[sample["responses"][at]["text"] for sample in samples],
        figures={name: measured[name].tolist() for name in (*OF_RESPONSE, "seen_kl") if name in measured},
    )


def write(file: Path, final: Final) -> None:
    """Writes `final.json`, in one step."""
    replace_text(file, json.dumps(plain(final), ensure_ascii=False) + "\n")


def read(file: Path) -> Final | None:
    """Reads `final.json`, if there is one.

    Raises:
        CommandError: it is damaged.
    """
    if not file.exists():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        kept = Final(update=found["update"], policy=dict(found["policy"]))
        for key in ("last_answer", "influence"):
            if key in found:
                kept[key] = dict(found[key])
        return kept
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(
            f"{file} is damaged: {error}. Remove it: all but the last responses is elsewhere."
        ) from error
