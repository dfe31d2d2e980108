"""Sample texts for people: what each role answered over time, side by side, and where it had collapsed."""

from collections.abc import Collection
from dataclasses import dataclass

from launch.records import Response, SampleLine
from launch.report.runs import Run
from launch.rows import show
from launch.texts import visible
from policies.health import signs_of_collapse
from policies.settings import Settings

NEEDED = {"repetition", "eos_rate", "kl", "response_length"}
"""The figures in which collapse shows."""
FIRST = 3
"""Responses of each policy alone that are shown in any case."""


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

    @property
    def collapsed(self) -> bool:
        """Whether any response shows a sign."""
        return any(answer.signs for _, answers in self.chains for answer in answers)


def moments_of(run: Run) -> list[Moment]:
    """Returns a run's samples by update, those of training before those on held-out queries."""
    standing = {line["update"]: line.get("health", []) for line in run.updates}
    endless = _endless(run)
    groups: dict[tuple[int, bool], list[SampleLine]] = {}
    for sample in run.result.samples:
        groups.setdefault((sample["update"], sample["held_out"]), []).append(sample)
    moments = [
        Moment(
            update,
            is_held_out,
            [warning["text"] for warning in standing.get(update, [])],
            [(visible(each["query"]), _answers(each, endless, run.settings)) for each in some],
        )
        for (update, is_held_out), some in sorted(groups.items())
    ]
    return moments + _alone(run)


def _alone(run: Run) -> list[Moment]:
    """Returns what each policy answered alone at the end: the first responses, and those that repeat themselves."""
    final = run.result.final
    if final is None or not final["texts"]:
        return []
    limit = run.settings.max_repetition
    shown: dict[str, list[Answer]] = {}
    for policy, texts in final["texts"].items():
        for place, text in enumerate(texts):
            share = text["repetition"] or 0.0
            if place < FIRST or share > limit:
                reward = show(text["task_reward"], "{:+.2f}")
                answer = Answer("alone", policy, reward, visible(text["text"]), _repeats(share, limit))
                shown.setdefault(visible(text["query"]), []).append(answer)
    return [Moment(final["update"], True, [], list(shown.items()))]


def _repeats(share: float, limit: float) -> list[str]:
    return [f"repeats itself: {share:.0%} of its token pairs"] if share > limit else []


def _answers(sample: SampleLine, endless: Collection[tuple[int, str]], settings: Settings) -> list[Answer]:
    return [
        Answer(
            role=response["role"],
            policy=response["policy"],
            reward=show(response["task_reward"], "{:+.2f}"),
            text=visible(response["text"]),
            signs=_signs(response, (sample["update"], response["policy"]) in endless, settings),
        )
        for response in sample["responses"]
    ]


def _signs(response: Response, endless: bool, settings: Settings) -> list[str]:
    """Judges a response by the limits of `policies.health`; that it was cut is a sign only if its policy is endless."""
    signs = _repeats(response.get("repetition", 0.0), settings.max_repetition)
    return [*signs, "does not end"] if endless and not response.get("ended", True) else signs


def _endless(run: Run) -> set[tuple[int, str]]:
    """Returns the updates and policies at which `policies.health` would find the end-of-sequence rate too low."""
    first: dict[str, float] = {}
    found = set()
    for line in run.updates:
        for policy, figures in line.get("policy", {}).items():
            known = {key: value for key, value in figures.items() if value is not None}
            if known.keys() >= NEEDED:
                rate = first.setdefault(policy, known["eos_rate"])
                if any(sign.signature == "eos" for sign in signs_of_collapse(run.settings, policy, known, rate)):
                    found.add((line["update"], policy))
    return found
