"""Probes a run's policies or a model in this process, in a folder from which a killed probe resumes.

responses.jsonl   the identity of the probe, then a line per completed batch with its responses
probe.json        the figures, what they advise, and the outcomes they are computed from
log.txt           the output of libraries and rewards
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from cory_env.rewarding.worker import RewardWorker
from cory_env.rewards.votes import answer_reader
from launch.console.errors import CommandError
from launch.evaluation.batches import open_batches, show_work
from launch.models.generators import load_generator, start_generator
from launch.probing.advice import Advice, advise
from launch.probing.figures import Figure, Outcomes, SecondAnswers, compute_figures
from launch.probing.plan import ProbeBatch, ProbePlan
from launch.probing.sampler import ProbedSample, Sampler, answer_numbers
from launch.run_folder.environment import versions
from launch.run_folder.records import to_json
from policies.files import atomic_write
from policies.settings.settings import BY_CONTENT

if TYPE_CHECKING:
    from policies.generation.generator import Generator

RESULT = "probe.json"


class ProbeResult(NamedTuple):
    """The result of a probe."""

    figures: dict[float, dict[str, Figure]]
    """By temperature and name; see `compute_figures`."""
    advice: Advice
    dropped: int
    """Number of queries left out at some temperature, because the reward or feedback function failed on a response."""


def probe_folder(target: str, plan: ProbePlan) -> Path:
    """Returns the default folder: inside the run's folder, or in `./probes` for models."""
    run, checkpoint = (None, None) if plan.policies is None else (plan.policies.run, plan.policies.folder)
    name = plan.fingerprint if checkpoint is None else f"{checkpoint.name}-{plan.fingerprint}"
    if run is not None:
        return run.path / "probe" / name
    return Path("probes", f"{Path(target).resolve().name}-{name}")


def run_probe(
    plan: ProbePlan,
    path: Path,
    command: str,
    *,
    solved_at: float | None = None,
    quiet: bool = False,
    debug: bool = False,
) -> ProbeResult:
    """Samples the remaining batches and writes `probe.json`.

    Args:
        path: Its folder: new, empty, or with the same probe to resume.
        solved_at: Task reward from which an answer is right; None: the task's.
    """
    required = plan.required_reward(solved_at)
    identity = plan.identity()
    with open_batches(path, "probe", identity, plan.batches(), quiet=quiet, debug=debug) as (batches, progress):
        if batches.done < len(batches.work):
            with show_work(progress, path / "log.txt", debug=debug), contextlib.ExitStack() as stack:
                progress.stage("Loading the model")
                sample = stack.enter_context(open_sampler(plan))
                progress.stage("Sampling answers")
                batches.run(lambda batch: {"samples": sample(batch)}, progress)
        samples = [record for batch in batches.results for record in batch["samples"]]
        result, outcomes = compute_result(plan, samples, required)
        record = {"command": command, "versions": versions(), **identity}
        record["names"] = {key: getattr(plan.settings, key) for key in BY_CONTENT}
        record |= {"solved_at": required, "dropped": result.dropped, "advice": result.advice._asdict()}
        record["results"] = [
            {
                "temperature": temperature,
                "figures": {
                    name: {**figure.estimate._asdict(), "tokens": figure.tokens} for name, figure in figures.items()
                },
                "outcomes": outcomes[temperature],
            }
            for temperature, figures in result.figures.items()
        ]
        atomic_write(path / RESULT, json.dumps(to_json(record), ensure_ascii=False) + "\n")
    return result


@contextlib.contextmanager
def open_sampler(plan: ProbePlan) -> Iterator[Callable[[ProbeBatch], list[ProbedSample]]]:
    """Context manager: the function that samples a batch of the plan, with its models and its reward process."""
    settings, policy_ids, backend = plan.settings, plan.policy_ids, plan.settings.backend
    plain = plan.plain_settings.make_chain(plan.plain_task, plan.tokenizers, _tokenizer_ids(plan))
    with_feedback = None
    if plan.task.feedback is not None:
        with_feedback = settings.make_chain(plan.task, plan.tokenizers, _tokenizer_ids(plan))
    worker = RewardWorker(
        plan.task.reward,
        feedback=plan.task.feedback,
        timeout=settings.reward_timeout,
        on_error=settings.on_reward_error,
    )
    with worker:
        worker.prepare()  # while the engines start
        distinct = tuple(dict.fromkeys(policy_ids))
        generator: Generator
        if plan.policies is None:
            models = {policy_id: settings.model_paths[policy_id] for policy_id in distinct}
            generator = start_generator(settings, models, backend, plan.batch_size)
        else:
            policies = replace(plan.policies, settings=settings)
            generator = load_generator(policies, distinct, backend, plan.batch_size)
        try:
            sampler = Sampler(generator, worker, policy_ids, plain, with_feedback, settings.seed)
            queries = plan.task.queries(plan.split)
            yield lambda batch: sampler.sample([(queries[query], sample) for query, sample in batch[1]], batch[0])
        finally:
            generator.close()


def _tokenizer_ids(plan: ProbePlan) -> list[str]:
    """Returns the policies whose tokenizers the agents use; `AVERAGE_POLICY` has none of its own."""
    first = plan.settings.policy_ids[0]
    return [policy_id if policy_id in plan.tokenizers else first for policy_id in plan.policy_ids]


def compute_result(
    plan: ProbePlan, samples: Sequence[ProbedSample], required: float
) -> tuple[ProbeResult, dict[float, dict[str, Any]]]:
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
        outcomes = _outcomes(usable, required, read_answer)
        figures[temperature] = compute_figures(outcomes, plan.settings.seed)
        records[temperature] = {"queries": [row[0]["query"] for row in usable], **_to_record(outcomes)}
    return ProbeResult(figures, advise(figures), dropped), records


def _is_complete(sample: ProbedSample) -> bool:
    answers = [sample["first"], sample.get("second"), sample.get("second_feedback", sample["first"])]
    return all(answer is not None and answer["task_reward"] is not None for answer in answers)


def _outcomes(
    rows: Sequence[Sequence[ProbedSample]], required: float, read_answer: Callable[[str], object]
) -> Outcomes:
    """Converts samples, by query, to arrays."""

    def array(name: Literal["first", "second", "second_feedback"]) -> SecondAnswers:
        answers = [[sample[name] for sample in row] for row in rows]
        rewards = np.array([[float(answer["task_reward"] or 0.0) for answer in row] for row in answers])
        return SecondAnswers(
            rewards >= required, np.array([[float(answer["length"]) for answer in row] for row in answers])
        )

    numbers = [answer_numbers([sample["first"]["text"] for sample in row], read_answer) for row in rows]
    outcomes = Outcomes(*array("first"), np.array(numbers), array("second"))
    if "feedback" not in rows[0][0]:
        return outcomes
    accepted = np.array([[sample["feedback"] is None for sample in row] for row in rows])
    return outcomes._replace(accepted=accepted, second_feedback=array("second_feedback"))


def _to_record(outcomes: Outcomes | SecondAnswers) -> dict[str, Any]:
    """Returns outcomes as JSON: lists `[queries, samples]`, with 0 and 1 for false and true."""
    record: dict[str, Any] = {}
    for name, value in outcomes._asdict().items():
        if isinstance(value, SecondAnswers):
            record[name] = _to_record(value)
        else:
            record[name] = None if value is None else value.astype(int).tolist()
    return record
