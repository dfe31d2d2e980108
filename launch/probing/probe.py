"""Probes a run's policies, a model or an API, with all results in a folder.

responses.jsonl   a line per first answer, with the second answers to it; or per episode
probe.json        the figures and what they advise
log.txt           the output of libraries and rewards
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cory_env.rewards.votes import answer_reader
from launch.display.terminal import ProgressPrinter
from launch.evaluation.batches import RESPONSES, append_lines, open_results, show_progress, write_lines
from launch.evaluation.evaluation import describe_inputs
from launch.probing.advice import Advice, advise, advise_team, advise_turns
from launch.probing.envs import agents_without_turns, collect_episodes, compute_agent_figures, sample_episodes
from launch.probing.figures import Figure, compute_figures
from launch.probing.outcomes import collect_outcomes
from launch.probing.plan import ProbePlan
from launch.probing.sampler import sample_answers
from launch.probing.team_figures import TeamOutcomes, compute_team_figures, lacks_samples
from launch.probing.teams import collect_teams, sample_batches, sample_teams

RESULT = "probe.json"
T = TypeVar("T")


class Probed(NamedTuple):
    """What was sampled, and computed from it.

    Attributes:
        answers: All answers, with `text` and `ended`.
        figures: By temperature and name.
        dropped: See `ProbeResult`.
        notes: See `ProbeResult`.
    """

    answers: list[Mapping[str, Any]]
    figures: dict[float, dict[str, Figure]]
    advice: Advice
    dropped: int
    notes: tuple[str, ...] = ()


class ProbeResult(NamedTuple):
    """The result of a probe.

    Attributes:
        figures: By temperature and name; see `compute_figures`, and with roles or an environment
            `compute_team_figures`, `compute_agent_figures`.
        dropped: Number of queries left out at some temperature, because the reward or feedback function failed.
        answers: The numbers of `all` answers, of `cut` ones (at `max_response_tokens`), and of `empty` ones.
        notes: Sentences that limit what the figures say.
    """

    figures: dict[float, dict[str, Figure]]
    advice: Advice
    dropped: int
    answers: dict[str, int]
    notes: tuple[str, ...] = ()


def run_probe(plan: ProbePlan, path: Path, command: str, *, quiet: bool = False, debug: bool = False) -> ProbeResult:
    """Samples the answers and writes the results to a folder, new or empty."""
    batches = len(plan.batches() if plan.team is None else sample_batches(plan))
    with open_results(path, "probe", batches, quiet=quiet, debug=debug) as (progress, _):
        run = _probe_pair if plan.team is None else _probe_team if plan.settings.env is None else _probe_env
        probed = run(plan, batches, progress, path)
        result = ProbeResult(probed.figures, probed.advice, probed.dropped, count_answers(probed.answers), probed.notes)
        record = {
            "command": command,
            **describe_inputs(plan.settings, plan.sources, None if plan.policies is None else plan.policies.update),
            **{"policies": plan.policy_ids, "split": plan.split, "queries": plan.queries, "samples": plan.samples},
            **({} if plan.endpoint is None else {"endpoint": plan.endpoint._asdict()}),
            **{"solved_at": plan.solved_at, "dropped": result.dropped, "answers": result.answers},
            **{"notes": result.notes, "advice": result.advice._asdict()},
            "results": [
                {
                    "temperature": temperature,
                    "figures": {
                        name: {**figure.estimate._asdict(), "tokens": figure.tokens} for name, figure in by_name.items()
                    },
                }
                for temperature, by_name in result.figures.items()
            ],
        }
        write_lines(path / RESULT, [record])
    return result


def record_samples(results: Iterable[list[T]], batches: int, progress: ProgressPrinter, path: Path) -> list[T]:
    """Returns all samples, and writes those of each batch as soon as they are there."""
    (path / RESPONSES).unlink(missing_ok=True)  # of a probe that failed
    samples: list[T] = []
    for batch in show_progress(results, batches, progress):
        append_lines(path / RESPONSES, batch)
        samples += batch
    return samples


def _probe_pair(plan: ProbePlan, batches: int, progress: ProgressPrinter, path: Path) -> Probed:
    """Samples first and second answers."""
    samples = record_samples(sample_answers(plan, progress), batches, progress, path)
    read_answer = answer_reader(plan.task.reward)
    figures, dropped = {}, 0
    for temperature in plan.temperatures:
        outcomes = collect_outcomes(
            [sample for sample in samples if sample["temperature"] == temperature], plan.solved_at, read_answer
        )
        dropped = max(dropped, plan.queries - len(outcomes.right))
        figures[temperature] = compute_figures(outcomes, plan.settings.seed)
    answers: list[Mapping[str, Any]] = [
        answer
        for sample in samples
        for answer in (sample["first"], sample.get("second"), sample.get("second_feedback"))
        if answer is not None
    ]
    return Probed(answers, figures, advise(figures), dropped)


def _probe_team(plan: ProbePlan, batches: int, progress: ProgressPrinter, path: Path) -> Probed:
    """Samples single answers and episodes of the team."""
    assert plan.team is not None
    samples = record_samples(sample_teams(plan, progress), batches, progress, path)
    read_answer, has_check = answer_reader(plan.task.reward), plan.task.feedback is not None
    figures, dropped, notes = {}, 0, list[str]()
    for temperature in plan.temperatures:
        chosen = [sample for sample in samples if sample["temperature"] == temperature]
        outcomes = collect_teams(chosen, plan.team.positions, plan.solved_at, read_answer, has_check=has_check)
        dropped = max(dropped, plan.queries - len(outcomes.right))
        figures[temperature] = compute_team_figures(outcomes, plan.settings.seed)
        notes += _note_missing_samples(outcomes, temperature)
    answers: list[Mapping[str, Any]] = [response for sample in samples for response in sample["responses"]]
    advice = advise_team(figures, has_check=has_check)
    return Probed(answers, figures, advice, dropped, tuple(notes))


def _probe_env(plan: ProbePlan, batches: int, progress: ProgressPrinter, path: Path) -> Probed:
    """Samples episodes of an environment, and their first turns."""
    samples = record_samples(sample_episodes(plan, progress), batches, progress, path)
    figures, dropped, notes = {}, 0, list[str]()
    for temperature in plan.temperatures:
        chosen = [sample for sample in samples if sample["temperature"] == temperature]
        outcomes = collect_episodes(chosen, plan.solved_at)
        dropped = max(dropped, plan.queries - len(outcomes.right))
        figures[temperature] = compute_team_figures(outcomes, plan.settings.seed)
        figures[temperature] |= compute_agent_figures(chosen, plan.settings.seed)
        notes += _note_missing_samples(outcomes, temperature)
    if absent := agents_without_turns(samples):
        names = ", ".join(absent)
        notes.append(f"Only whole episodes reach {names}, so the comparison with one turn says nothing about {names}.")
    answers: list[Mapping[str, Any]] = [response for sample in samples for response in sample["responses"]]
    return Probed(answers, figures, advise_turns(figures), dropped, tuple(notes))


def _note_missing_samples(outcomes: TeamOutcomes, temperature: float) -> list[str]:
    if not lacks_samples(outcomes):
        return []
    return [
        f"At temperature {temperature:g}, the single agent has only {outcomes.single.right.shape[1]} samples, with "
        "fewer tokens than the comparison allows. Raise --samples."
    ]


def count_answers(answers: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Counts all answers, those that were cut, and those that are empty."""
    counts = {"all": 0, "cut": 0, "empty": 0}
    for answer in answers:
        counts["all"] += 1
        counts["cut"] += not answer["ended"]
        counts["empty"] += not answer["text"].strip()
    return counts
