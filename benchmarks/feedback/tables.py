"""Tables of the study: what was measured, the contrasts, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.table import Table

from benchmarks.arm_runs import missing_runs
from benchmarks.feedback.analysis import (
    ContrastResult,
    Results,
    evaluate_contrasts,
    measured_at,
    score_of,
    temperature_key,
    token_ratio,
    way_of,
)
from benchmarks.feedback.design import CONTRASTS, TEMPERATURES, Choice, Contrast, equal_rate_contrasts
from benchmarks.feedback.runs import Job, Result
from launch.display.statistics import Estimate, mean_ci
from launch.display.tables import new_table
from launch.display.tables import print_tables as print_rich
from launch.experiments.arm_differences import arm_differences, format_differences

SHARES = {
    "p1": "p1",
    "p1_again": "p1'",
    "p2": "p2, no feedback",
    "p2_feedback": "p2",
    "kept_feedback": "kept",
}
"""Figures of a probe to their headings: see `launch.probing.figures`."""
LABELS = {"chain": "chain", "one_answer": "one answer", "best_of": "best-of-n"}


def print_tables(stream: TextIO, stages: Sequence[tuple[str, Sequence[Job]]], choice: Choice | None) -> None:
    """Prints everything that is there, and what is missing."""
    for name, jobs in stages:
        results = group_results(jobs)
        print(f"\n{name}: {sum(map(len, results.values()))} of {len(jobs)} runs", file=stream)
        if missing := missing_runs(jobs):
            print(f"  missing: {missing}", file=stream)
        if not results:
            continue
        if name.startswith("pilot"):
            print_rich(stream, pilot_table(results))
            continue
        assert choice is not None
        print_rich(stream, shares_table(results, choice), costs_table(results))
    if choice is None:
        print("\nThe pilot is not complete, so the settings of the main runs are not chosen yet.", file=stream)
        return
    print(f"\nChosen: {choice._asdict()}", file=stream)
    main = group_results(dict(stages)["main"])
    contrasts = evaluate_contrasts(main, choice)
    if contrasts:
        print(f"\nContrasts, paired by seed; p of sign-flip tests, Holm-corrected for {len(CONTRASTS)}:", file=stream)
        print_rich(stream, contrasts_table(contrasts, main, choice))
        print(differences_text(contrasts, dict(stages)["main"]), file=stream)
        pilot_jobs = [job for name, jobs in stages if name.startswith("pilot") for job in jobs]
        pilot = group_results(pilot_jobs)
        single_contrasts = (evaluate_contrasts(pilot, choice, [contrast]) for contrast in equal_rate_contrasts(choice))
        equal_rates = [result for results in single_contrasts for result in results if len(result.difference.seeds) > 1]
        print("\nAt equal learning rates, pilot seeds; not planned, not corrected:", file=stream)
        print_rich(stream, contrasts_table(equal_rates, pilot, choice))
        print(differences_text(equal_rates, pilot_jobs), file=stream)
        print(f"Generated tokens in training, chain / single agent: {token_ratio(main) or 0:.4f}", file=stream)


def group_results(jobs: Sequence[Job]) -> dict[str, dict[int, Result]]:
    """Reads the results that are there, by arm and seed."""
    results: dict[str, dict[int, Result]] = {}
    for job in jobs:
        result = job.read()
        if result is not None:
            results.setdefault(job.arm.name, {})[job.seed] = result
    return results


def pilot_table(results: Results) -> Table:
    """Returns a table of mean scores over pilot seeds, at each temperature."""
    headings = [f"{LABELS[source]} {value:g}" for source in ("one_answer", "chain") for value in TEMPERATURES]
    table = new_table(["arm"], ["seeds", *headings, "best-of-2", "tokens"])
    for arm, by_seed in results.items():
        runs = list(by_seed.values())
        scores = [
            mean_ci(_score(run, source, value) for run in runs)
            for source in ("one_answer", "chain")
            for value in TEMPERATURES
        ]
        best_of_2 = max(_best_of(runs, 2, value).mean for value in TEMPERATURES)
        tokens = [training["tokens"] for run in runs if (training := run["train"]) is not None]
        total = f"{sum(tokens) / len(tokens):,.0f}" if tokens else "-"
        row = [f"{score.mean:.3f}" for score in scores]
        table.add_row(arm, str(len(runs)), *row, f"{best_of_2:.3f}", total)
    return table


def shares_table(results: Results, choice: Choice) -> Table:
    """Returns a table of each arm's scores and conditional shares at the temperature of the chains."""
    table = new_table(["arm"], ["seeds", "one answer", "best-of-2", "best-of-3", "chain", "tokens", *SHARES.values()])
    for arm, by_seed in results.items():
        runs = list(by_seed.values())
        value = choice.temperatures[temperature_key(arm, "chain")]
        ways = [
            mean_ci(_score(run, "one_answer", value) for run in runs),
            _best_of(runs, 2, value),
            _best_of(runs, 3, value),
            mean_ci(_score(run, "chain", value) for run in runs),
        ]
        tokens = mean_ci(_tokens(run, value) for run in runs)
        shares = [mean_ci(_share(run, key, value) for run in runs) for key in SHARES]
        row = [estimate.format("{:.3f}") for estimate in ways]
        table.add_row(arm, str(len(runs)), *row, f"{tokens.mean:.1f}", *(f"{share.mean:.3f}" for share in shares))
    return table


def costs_table(results: Results) -> Table:
    """Returns a table of the mean costs of training, and of asking a query."""
    table = new_table(["arm"], ["updates", "steps per LLM", "tokens", "prompt tokens", "seconds", "probe, s"])
    for arm, by_seed in results.items():
        trainings = [training for run in by_seed.values() if (training := run["train"]) is not None]
        means = [
            f"{sum(training[key] for training in trainings) / len(trainings):,.0f}" if trainings else "-"
            for key in ("updates", "steps", "tokens", "prompt_tokens", "seconds")
        ]
        probe_seconds = sum(run["probe_seconds"] for run in by_seed.values()) / len(by_seed)
        table.add_row(arm, *means, f"{probe_seconds:.0f}")
    return table


def contrasts_table(contrasts: Sequence[ContrastResult], results: Results, choice: Choice) -> Table:
    """Returns a table of contrasts: means of both sides, differences with their intervals, and the corrected p."""
    table = new_table(["", "against", "at"], ["seeds", "", "against", "difference", "p"])
    for contrast, difference, p in contrasts:
        sides = [
            mean_ci(score_of(results, choice, arm, source, seed) for seed in difference.seeds).mean
            for arm, source in ((contrast.arm, contrast.source), (contrast.against, contrast.against_source))
        ]
        table.add_row(
            *_names(contrast),
            str(len(difference.seeds)),
            *(f"{side:.3f}" for side in sides),
            difference.estimate.format("{:+.3f}"),
            "" if p is None else f"{p:.2g}",
        )
    return table


def differences_text(contrasts: Sequence[ContrastResult], jobs: Sequence[Job]) -> str:
    """Returns the settings in which the arms of contrasts differ.

    Args:
        contrasts: The contrasts.
        jobs: The runs of their arms.
    """
    jobs_of = {job.arm.name: job for job in jobs}

    def differences(arm: str, against: str) -> list[str]:
        if untrained := [f"{name} is not trained" for name in (arm, against) if jobs_of[name].arm.settings is None]:
            return untrained
        return arm_differences(jobs_of[arm].settings, jobs_of[against].settings)

    pairs = [(result.contrast.arm, result.contrast.against) for result in contrasts]
    return format_differences((" vs. ".join(pair), differences(*pair)) for pair in pairs)


def _names(contrast: Contrast) -> tuple[str, str, str]:
    return (
        f"{contrast.arm}, {LABELS[contrast.source]}",
        f"{contrast.against}, {LABELS[contrast.against_source]}",
        contrast.at,
    )


def _best_of(runs: Sequence[Result], n: int, temperature: float) -> Estimate:
    measured = [measured_at(run, temperature) for run in runs]
    ways = [[] if entry is None else entry["best_of"] for entry in measured]
    return mean_ci(by_n[n - 1]["score"] if len(by_n) >= n else None for by_n in ways)


def _score(result: Result, source: str, temperature: float) -> float | None:
    way = way_of(result, source, temperature, 0.0)
    return None if way is None else way["score"]


def _tokens(result: Result, temperature: float) -> float | None:
    way = way_of(result, "chain", temperature, 0.0)
    return None if way is None else way["tokens"]


def _share(result: Result, name: str, temperature: float) -> float | None:
    measured = measured_at(result, temperature)
    return None if measured is None else measured["figures"].get(name)
