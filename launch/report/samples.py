"""Sample texts for people: what each role answered over time, side by side, and what repeats itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launch.display.tables import written
from launch.display.texts import visible
from launch.experiments.measures import collapse
from launch.experiments.results import Text
from launch.report.runs import Run
from launch.run_folder.records import SampleLine

FIRST = 3
"""Responses of each policy alone that are shown in any case."""


@dataclass(frozen=True)
class Answer:
    """A response as it is shown."""

    role: str
    policy: str
    reward: str
    text: str
    repeats: str
    """How much of it repeats itself, in words, if that is a sign of collapse."""


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
    def marked(self) -> bool:
        """Whether a response repeats itself."""
        return any(answer.repeats for _, answers in self.chains for answer in answers)


def moments_of(run: Run) -> list[Moment]:
    """Returns a run's samples by update, those of training before those on held-out queries."""
    standing = {line["update"]: line.get("health", []) for line in run.updates}
    limit = run.settings.max_repetition
    groups: dict[tuple[int, bool], list[SampleLine]] = {}
    for sample in run.result.samples:
        groups.setdefault((sample["update"], sample["held_out"]), []).append(sample)
    moments = []
    for (update, held_out), some in sorted(groups.items()):
        warnings = [warning["text"] for warning in standing.get(update, [])]
        chains = [
            (
                visible(sample["query"]),
                [
                    Answer(
                        each["role"],
                        each["policy"],
                        written("task_reward", each["task_reward"]),
                        visible(each["text"]),
                        _repeats(each.get("repetition"), limit),
                    )
                    for each in sample["responses"]
                ],
            )
            for sample in some
        ]
        moments.append(Moment(update, held_out, warnings, chains))
    last = run.result.final
    if last is not None and last["texts"]:
        alone = _alone(last["texts"], limit)
        moments.append(Moment(last["update"], True, [sign.text for sign in collapse(run.result)], alone))
    return moments


def _alone(texts: Mapping[str, Sequence[Text]], limit: float) -> list[tuple[str, list[Answer]]]:
    """Returns what each policy answered alone at the end: the first responses, and those that repeat themselves."""
    shown: dict[str, list[Answer]] = {}
    for policy, of_policy in texts.items():
        for number, text in enumerate(of_policy):
            repeats = _repeats(text["repetition"], limit)
            if number < FIRST or repeats:
                reward = written("task_reward", text["task_reward"])
                answer = Answer("alone", policy, reward, visible(text["text"]), repeats)
                shown.setdefault(visible(text["query"]), []).append(answer)
    return list(shown.items())


def _repeats(share: float | None, limit: float) -> str:
    return f"repeats itself: {share:.0%} of its token pairs" if share is not None and share > limit else ""
