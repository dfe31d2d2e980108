"""Probes a run's policies or a model in this process, with all results in a folder.

responses.jsonl   a line per first answer, with the second answers to it
probe.json        the figures and what they advise
log.txt           the output of libraries and rewards
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from cory_env.rewards.votes import answer_reader
from launch.console.errors import CommandError
from launch.evaluation.batches import RESPONSES, open_results, show_progress, write_lines
from launch.evaluation.evaluation import describe_inputs
from launch.probing.advice import Advice, advise
from launch.probing.figures import NO_ANSWER, Figure, Outcomes, SecondAnswers, compute_figures
from launch.probing.plan import ProbePlan
from launch.probing.sampler import ProbedSample, sample_answers

RESULT = "probe.json"


class ProbeResult(NamedTuple):
    """The result of a probe.

    Attributes:
        figures: By temperature and name; see `compute_figures`.
        dropped: Number of queries left out at some temperature, because the reward or feedback function failed.
        answers: The numbers of `all` answers, of `cut` ones (at `max_response_tokens`), and of `empty` ones.
    """

    figures: dict[float, dict[str, Figure]]
    advice: Advice
    dropped: int
    answers: dict[str, int]


def run_probe(plan: ProbePlan, path: Path, command: str, *, quiet: bool = False, debug: bool = False) -> ProbeResult:
    """Samples the answers and writes the results to a folder, new or empty."""
    batches, figures, dropped = len(plan.batches()), {}, 0
    with open_results(path, "probe", batches, quiet=quiet, debug=debug) as (progress, _):
        results = show_progress(sample_answers(plan, progress), batches, progress)
        samples = [sample for batch in results for sample in batch]
        read_answer = answer_reader(plan.task.reward)
        for temperature in plan.temperatures:
            outcomes = collect_outcomes(
                [sample for sample in samples if sample["temperature"] == temperature], plan.solved_at, read_answer
            )
            dropped = max(dropped, plan.queries - len(outcomes.right))
            figures[temperature] = compute_figures(outcomes, plan.settings.seed)
        result = ProbeResult(figures, advise(figures), dropped, count_answers(samples))
        record = {
            "command": command,
            **describe_inputs(plan.settings, plan.sources, None if plan.policies is None else plan.policies.update),
            **{"policies": plan.policy_ids, "split": plan.split, "queries": plan.queries, "samples": plan.samples},
            **({} if plan.endpoint is None else {"endpoint": plan.endpoint._asdict()}),
            **{
                "solved_at": plan.solved_at,
                "dropped": dropped,
                "answers": result.answers,
                "advice": result.advice._asdict(),
            },
            "results": [
                {
                    "temperature": temperature,
                    "figures": {
                        name: {**figure.estimate._asdict(), "tokens": figure.tokens} for name, figure in by_name.items()
                    },
                }
                for temperature, by_name in figures.items()
            ],
        }
        write_lines(path / RESPONSES, samples)
        write_lines(path / RESULT, [record])
    return result


def count_answers(samples: Sequence[ProbedSample]) -> dict[str, int]:
    """Counts the answers that were sampled, and those that were cut or are empty."""
    answers = [
        answer
        for sample in samples
        for answer in (sample["first"], sample.get("second"), sample.get("second_feedback"))
        if answer is not None
    ]
    return {
        "all": len(answers),
        "cut": sum(not answer["ended"] for answer in answers),
        "empty": sum(not answer["text"].strip() for answer in answers),
    }


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

    numbers = [_number_answers([read_answer(sample["first"]["text"]) for sample in row]) for row in rows]
    outcomes = Outcomes(*collect("first"), np.array(numbers), collect("second"))
    if "feedback" not in rows[0][0]:
        return outcomes
    accepted = np.array([[sample["feedback"] is None for sample in row] for row in rows])
    return outcomes._replace(accepted=accepted, second_feedback=collect("second_feedback"))


def _is_complete(sample: ProbedSample) -> bool:
    answers = [sample["first"], sample.get("second"), sample.get("second_feedback", sample["first"])]
    return all(answer is not None and answer["task_reward"] is not None for answer in answers)


def _number_answers(answers: Sequence[object]) -> list[int]:
    """Numbers the answers to one query: equal answers get the same number; None is no answer."""
    numbers = {answer: number for number, answer in enumerate(dict.fromkeys(a for a in answers if a is not None))}
    return [NO_ANSWER if answer is None else numbers[answer] for answer in answers]
