"""Converts the samples of a probe to arrays."""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from launch.console.errors import CommandError
from launch.probing.figures import NO_ANSWER, Outcomes, SecondAnswers
from launch.probing.sampler import ProbedSample


def collect_outcomes(
    samples: Sequence[ProbedSample], solved_at: float, read_answer: Callable[[str], object]
) -> Outcomes:
    """Converts the samples of one temperature to arrays, without the queries on which a function failed.

    Args:
        solved_at: Task reward from which an answer is right.
        read_answer: Returns the answer in a response, which must be hashable, for votes; None if there is none.
    """
    by_query: dict[int, list[ProbedSample]] = {}
    for sample in samples:
        by_query.setdefault(sample["query"], []).append(sample)
    rows = [row for row in by_query.values() if all(map(_is_complete, row))]
    if len(rows) < 2:
        raise CommandError("The reward or feedback function failed on all queries. Fix the function.")

    def collect(name: Literal["first", "second", "second_feedback"]) -> SecondAnswers:
        rewards = np.array([[float(sample[name]["task_reward"] or 0.0) for sample in row] for row in rows])
        return SecondAnswers(
            rewards >= solved_at, np.array([[float(sample[name]["length"]) for sample in row] for row in rows])
        )

    numbers = [number_answers([read_answer(sample["first"]["text"]) for sample in row]) for row in rows]
    outcomes = Outcomes(*collect("first"), np.array(numbers), collect("second"))
    if "feedback" not in rows[0][0]:
        return outcomes
    accepted = np.array([[sample["feedback"] is None for sample in row] for row in rows])
    return outcomes._replace(accepted=accepted, second_feedback=collect("second_feedback"))


def _is_complete(sample: ProbedSample) -> bool:
    answers = [sample["first"], sample.get("second"), sample.get("second_feedback", sample["first"])]
    return all(answer is not None and answer["task_reward"] is not None for answer in answers)


def number_answers(answers: Sequence[object]) -> list[int]:
    """Numbers the answers to one query: equal answers get the same number; None is no answer."""
    numbers = {answer: number for number, answer in enumerate(dict.fromkeys(a for a in answers if a is not None))}
    return [NO_ANSWER if answer is None else numbers[answer] for answer in answers]
