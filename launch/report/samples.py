"""Sample texts for people: what each role answered over time, side by side, and what repeats itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from launch.display.tables import written
from launch.display.texts import visible
from launch.experiments.measures import collapse
from launch.experiments.results import Text
from launch.report.runs import Run
from launch.run_folder.records import Response, SampleLine

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
    warnings = {line["update"]: [warning["text"] for warning in line.get("health", [])] for line in run.updates}
    limit = run.settings.max_repetition

    def moment(sample: SampleLine) -> tuple[int, bool]:
        return sample["update"], sample["held_out"]

    moments = [
        Moment(update, held_out, warnings.get(update, []), [_chain(sample, limit) for sample in some])
        for (update, held_out), some in groupby(sorted(run.result.samples, key=moment), moment)
    ]
    final = run.result.final
    if final is not None and final["texts"]:
        signs = [sign.text for sign in collapse(run.result)]
        moments.append(Moment(final["update"], True, signs, _alone(final["texts"], limit)))
    return moments


def _chain(sample: SampleLine, limit: float) -> tuple[str, list[Answer]]:
    answers = [_answer(each["role"], each["policy"], each, limit) for each in sample["responses"]]
    return visible(sample["query"]), answers


def _alone(texts: Mapping[str, Sequence[Text]], limit: float) -> list[tuple[str, list[Answer]]]:
    """Returns what each policy answered alone at the end: the first responses, and those that repeat themselves."""
    chains: dict[str, list[Answer]] = {}
    for policy, responses in texts.items():
        for number, response in enumerate(responses):
            answer = _answer("alone", policy, response, limit)
            if number < FIRST or answer.repeats:
                chains.setdefault(visible(response["query"]), []).append(answer)
    return list(chains.items())


def _answer(role: str, policy: str, response: Response | Text, limit: float) -> Answer:
    share = response.get("repetition")
    repeats = f"repeats itself: {share:.0%} of its token pairs" if share is not None and share > limit else ""
    return Answer(role, policy, written("task_reward", response["task_reward"]), visible(response["text"]), repeats)
