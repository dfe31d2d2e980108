"""Probes a run's policies or a model in this process, with all results in a folder.

responses.jsonl   a line per first answer, with the second answers to it
probe.json        the figures, what they advise, and the outcomes they are computed from
log.txt           the output of libraries and rewards
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
    """The result of a probe."""

    figures: dict[float, dict[str, Figure]]
    """By temperature and name; see `compute_figures`."""
    advice: Advice
    dropped: int
    """Number of queries left out at some temperature, because the reward or feedback function failed on a response."""


def run_probe(
    plan: ProbePlan,
    path: Path,
    command: str,
    *,
    quiet: bool = False,
    debug: bool = False,
) -> ProbeResult:
    """Samples the answers and writes the results.

    Args:
        path: The probe's folder, new or empty.
    """
    batches = len(plan.batches())
    with open_results(path, "probe", batches, quiet=quiet, debug=debug) as (progress, _):
        results = show_progress(sample_answers(plan, progress), batches, progress)
        samples = [sample for batch in results for sample in batch]
        result, outcomes = compute_result(plan, samples)
        record = {
            "command": command,
            **describe_inputs(plan.settings, plan.sources, None if plan.policies is None else plan.policies.update),
            **{"policies": plan.policy_ids, "split": plan.split, "queries": plan.queries, "samples": plan.samples},
            **{"solved_at": plan.solved_at, "dropped": result.dropped, "advice": result.advice._asdict()},
            "results": [
                {
                    "temperature": temperature,
                    "figures": {
                        name: {**figure.estimate._asdict(), "tokens": figure.tokens} for name, figure in figures.items()
                    },
                    "outcomes": outcomes[temperature],
                }
                for temperature, figures in result.figures.items()
            ],
        }
        write_lines(path / RESPONSES, samples)
        write_lines(path / RESULT, [record])
    return result


def compute_result(plan: ProbePlan, samples: Sequence[ProbedSample]) -> tuple[ProbeResult, dict[float, dict[str, Any]]]:
    """Computes the figures from all samples.

    Returns:
        The result; and by temperature, the outcomes as JSON: the `Outcomes`, with the queries' indices in their split.
    """
    read_answer = answer_reader(plan.task.reward)
    figures, records, dropped = {}, {}, 0
    by_query = [samples[start : start + plan.samples] for start in range(0, len(samples), plan.samples)]
    for index, temperature in enumerate(plan.temperatures):
        rows = by_query[index * plan.queries : (index + 1) * plan.queries]
        usable = [row for row in rows if all(map(_is_complete, row))]
        dropped = max(dropped, len(rows) - len(usable))
        if len(usable) < 2:
            raise CommandError("The reward or feedback function failed on all queries. Fix the function.")
        outcomes = _outcomes(usable, plan.solved_at, read_answer)
        figures[temperature] = compute_figures(outcomes, plan.settings.seed)
        records[temperature] = {"queries": [row[0]["query"] for row in usable], **_to_record(outcomes)}
    return ProbeResult(figures, advise(figures), dropped), records


def _is_complete(sample: ProbedSample) -> bool:
    answers = [sample["first"], sample.get("second"), sample.get("second_feedback", sample["first"])]
    return all(answer is not None and answer["task_reward"] is not None for answer in answers)


def _outcomes(
    rows: Sequence[Sequence[ProbedSample]], solved_at: float, read_answer: Callable[[str], object]
) -> Outcomes:
    """Converts samples, by query, to arrays."""

    def array(name: Literal["first", "second", "second_feedback"]) -> SecondAnswers:
        answers = [[sample[name] for sample in row] for row in rows]
        rewards = np.array([[float(answer["task_reward"] or 0.0) for answer in row] for row in answers])
        return SecondAnswers(
            rewards >= solved_at, np.array([[float(answer["length"]) for answer in row] for row in answers])
        )

    numbers = [_number_answers([read_answer(sample["first"]["text"]) for sample in row]) for row in rows]
    outcomes = Outcomes(*array("first"), np.array(numbers), array("second"))
    if "feedback" not in rows[0][0]:
        return outcomes
    accepted = np.array([[sample["feedback"] is None for sample in row] for row in rows])
    return outcomes._replace(accepted=accepted, second_feedback=array("second_feedback"))


def _number_answers(answers: Sequence[object]) -> list[int]:
    """Numbers the answers to one query: equal answers get the same number; None is no answer."""
    numbers = {answer: number for number, answer in enumerate(dict.fromkeys(a for a in answers if a is not None))}
    return [NO_ANSWER if answer is None else numbers[answer] for answer in answers]


def _to_record(outcomes: Outcomes | SecondAnswers) -> dict[str, Any]:
    """Returns outcomes as JSON: lists `[queries, samples]`, with 0 and 1 for false and true."""
    record: dict[str, Any] = {}
    for name, value in outcomes._asdict().items():
        if isinstance(value, SecondAnswers):
            record[name] = _to_record(value)
        else:
            record[name] = None if value is None else value.astype(int).tolist()
    return record
