"""Sample texts for people: what each role answered over time, side by side, and where it had collapsed."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from launch.display.tables import written
from launch.display.texts import visible
from launch.report.runs import Run
from launch.report.series import held_out
from launch.run_folder.records import Response, SampleLine
from launch.study.measures import SHOWS_COLLAPSE, collapse
from policies.health import signs_of_collapse
from policies.settings.settings import Settings

FIRST = 3
"""Responses of each policy alone that are shown in any case."""
FAR = "of a policy whose KL is beyond max_token_kl"


@dataclass(frozen=True)
class Answer:
    """A response as it is shown."""

    role: str
    policy: str
    reward: str
    text: str
    signs: list[str]
    """What of it is a sign of collapse."""


@dataclass(frozen=True)
class Moment:
    """The samples of one update."""

    update: int
    held_out: bool
    warnings: list[str]
    """The health warnings that stood."""
    chains: list[tuple[str, list[Answer]]]
    """Queries, each with the responses to it in order."""
    collapsed: bool
    """Whether a response or a policy showed a sign of collapse."""


Signs = Mapping[tuple[int, str], Collection[str]]
"""(update, policy) → the signatures of collapse that the policy showed then."""


def moments_of(run: Run) -> list[Moment]:
    """Returns a run's samples by update, those of training before those on held-out queries."""
    standing = {line["update"]: line.get("health", []) for line in run.updates}
    signs = _signs_of_policies(run)
    groups: dict[tuple[int, bool], list[SampleLine]] = {}
    for sample in run.result.samples:
        groups.setdefault((sample["update"], sample["held_out"]), []).append(sample)
    moments = [
        _moment(
            update,
            is_held_out,
            [warning["text"] for warning in standing.get(update, [])],
            [(visible(each["query"]), _answers(each, signs, run.settings)) for each in some],
        )
        for (update, is_held_out), some in sorted(groups.items())
    ]
    return moments + _alone(run)


def _moment(update: int, held_out: bool, warnings: list[str], chains: list[tuple[str, list[Answer]]]) -> Moment:
    return Moment(update, held_out, warnings, chains, any(answer.signs for _, answers in chains for answer in answers))


def _alone(run: Run) -> list[Moment]:
    """Returns what each policy answered alone at the end: the first responses, and those that repeat themselves."""
    last = run.result.final
    if last is None or not last["texts"]:
        return []
    collapsed = collapse(run.result)
    limit = run.settings.max_repetition
    shown: dict[str, list[Answer]] = {}
    for policy, texts in last["texts"].items():
        far = [FAR for sign in collapsed if (sign.signature, sign.of) == ("kl", policy)]
        for number, text in enumerate(texts):
            share = text["repetition"] or 0.0
            if number < FIRST or share > limit:
                reward = written("task_reward", text["task_reward"])
                answer = Answer("alone", policy, reward, visible(text["text"]), [*_repeats(share, limit), *far])
                shown.setdefault(visible(text["query"]), []).append(answer)
    return [_moment(last["update"], True, [sign.text for sign in collapsed], list(shown.items()))]


def _repeats(share: float, limit: float) -> list[str]:
    return [f"repeats itself: {share:.0%} of its token pairs"] if share > limit else []


def _answers(sample: SampleLine, signs: Signs, settings: Settings) -> list[Answer]:
    return [
        Answer(
            role=response["role"],
            policy=response["policy"],
            reward=written("task_reward", response["task_reward"]),
            text=visible(response["text"]),
            signs=_signs(response, signs.get((sample["update"], response["policy"]), ()), settings),
        )
        for response in sample["responses"]
    ]


def _signs(response: Response, of_policy: Collection[str], settings: Settings) -> list[str]:
    """Judges a response by the limits of `policies.health`.

    That it was cut is a sign only where its policy hardly ends any; KL is known of the policy alone.
    """
    signs = _repeats(response.get("repetition", 0.0), settings.max_repetition)
    signs += ["does not end"] if "eos" in of_policy and not response.get("ended", True) else []
    return signs + ([FAR] if "kl" in of_policy else [])


def _signs_of_policies(run: Run) -> Signs:
    """Returns the signs of collapse that `policies.health` finds in each update's training.

    The end-of-sequence rate before training is that of the evaluation then, of more responses than the first update's.
    """
    first = {policy: held_out(run, policy, "eos_rate").get(0, math.nan) for policy in run.settings.modules}
    found = {}
    for line in run.updates:
        for policy, figures in line.get("policy", {}).items():
            known = {key: value for key, value in figures.items() if value is not None}
            if known.keys() >= SHOWS_COLLAPSE:
                fewest = min(run.settings.eval_queries, run.settings.responses)
                signs = signs_of_collapse(run.settings, policy, known, first[policy], fewest)
                found[line["update"], policy] = {sign.signature for sign in signs}
    return found
