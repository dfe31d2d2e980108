"""Tables and the picture of the study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from rich.table import Table

from benchmarks.arm_runs import missing_runs
from benchmarks.team.analysis import Results, evaluate_contrasts, mean_score, read_results
from benchmarks.team.design import CONTRASTS
from benchmarks.team.runs import Job, Result
from launch.display.statistics import mean_ci
from launch.display.tables import new_table
from launch.display.tables import print_tables as print_rich

WAYS = (
    "one_answer",
    "best_of_2",
    "best_of_3",
    "blind",
    "chain",
    "swapped",
    "first only",
    "second only",
    "best_of_2_both",
)
BASE_WAYS = ("base one_answer", "base best_of_2", "base best_of_3", "base blind", "base chain")


def print_tables(stream: TextIO, stages: Mapping[str, Sequence[Job]], rates: Mapping[str, float] | None) -> None:
    """Prints everything that is there, and what is missing."""
    for name, jobs in stages.items():
        results = read_results(jobs)
        print(f"\n{name}: {sum(map(len, results.values()))} of {len(jobs)} runs", file=stream)
        if text := missing_runs(jobs):
            print(f"  missing: {text}", file=stream)
        if results:
            print_rich(stream, ways_table(results, jobs), base_table(results), costs_table(results))
    if rates is None:
        print("\nThe pilot is not complete, so the rates of the main runs are not chosen yet.", file=stream)
        return
    print(f"\nBest rates: {dict(rates)}", file=stream)
    contrasts = evaluate_contrasts(read_results(stages["main"]), rates)
    if not contrasts:
        return
    table = new_table(["contrast", "rates"], ["seeds", "", "against", "difference", "p"])
    for contrast in contrasts:
        sides = (f"{side:.3f}" for side in contrast.sides)
        p = "-" if contrast.p is None else f"{contrast.p:.3f}"
        rates_text = " ".join(f"{rate:g}" for rate in dict.fromkeys(contrast.rates))
        estimate = contrast.difference.estimate.format("{:+.3f}")
        table.add_row(contrast.name, rates_text, str(len(contrast.difference.seeds)), *sides, estimate, p)
    print(f"\nContrasts, paired by seed; p of sign-flip tests, Holm-corrected for {len(CONTRASTS) + 1}:", file=stream)
    print_rich(stream, table)


def ways_table(results: Results, jobs: Sequence[Job]) -> Table:
    """Returns a table of mean scores, by arm and way."""
    table = new_table(["arm"], ["seeds", *WAYS, "partner of another seed", "tokens per query"])
    for (kind, lr), by_seed in results.items():
        partners = [job.read_partners() for job in jobs if (job.arm.kind, job.arm.lr) == (kind, lr)]
        partner_score = mean_ci(way["score"] for way in partners if way is not None)
        tokens = mean_ci(result["ways"]["chain"]["tokens"] for result in by_seed.values() if result["ways"])
        cells = [_cell(by_seed, way) for way in WAYS]
        partner_cell = partner_score.format("{:.3f}") if partner_score.n else "-"
        table.add_row(f"{kind} {lr:g}", str(len(by_seed)), *cells, partner_cell, f"{tokens.mean:.1f}")
    return table


def base_table(results: Results) -> Table:
    """Returns a table of the scores of the initial model, which were measured with each single agent."""
    table = new_table(["initial model"], ["seeds", *(way.removeprefix("base ") for way in BASE_WAYS)])
    singles = {seed: result for (kind, _), runs in results.items() if kind == "single" for seed, result in runs.items()}
    if singles:
        table.add_row("", str(len(singles)), *(_cell(singles, way) for way in BASE_WAYS))
    return table


def costs_table(results: Results) -> Table:
    """Returns a table of the mean costs of training, and of answering a query as in the chain."""
    headings = ("parameters", "tokens", "prompt tokens", "seconds", "prompt tokens per query", "seconds of measuring")
    table = new_table(["arm"], headings)
    for (kind, lr), by_seed in results.items():
        runs = list(by_seed.values())
        train = [
            f"{mean_ci(run['train'][key] for run in runs).mean:,.0f}" for key in ("tokens", "prompt_tokens", "seconds")
        ]
        prompts = mean_ci(run["ways"]["chain"]["prompt_tokens"] for run in runs if run["ways"]).mean
        measuring = mean_ci(run["measure_seconds"] for run in runs).mean
        table.add_row(f"{kind} {lr:g}", f"{runs[0]['parameters']:,}", *train, f"{prompts:.0f}", f"{measuring:.0f}")
    return table


def _cell(by_seed: Mapping[int, Result], way: str) -> str:
    if not all(way in result["ways"] for result in by_seed.values() if result["ways"]):
        return "-"
    return mean_score(by_seed, way).format("{:.3f}")


def draw(path: Path, results: Results, rates: Mapping[str, float]) -> None:
    """Draws the share of solved queries over the generated tokens per query, with 95 % intervals over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    series = (
        ("base model: 1, 2, 3 answers", "single", BASE_WAYS[:3], "o--"),
        ("untrained chain with feedback", "single", ("base chain",), "s"),
        ("single agent: 1, 2, 3 answers", "single", ("one_answer", "best_of_2", "best_of_3"), "o-"),
        ("its LLM, in a chain with feedback", "single", ("chain",), "s"),
        ("trained with two turns, no feedback", "turns", ("blind",), "^"),
        ("trained chain with feedback, one LLM", "feedback", ("chain",), "s"),
        ("… two LLMs", "fixed", ("chain",), "D"),
        ("… two LLMs that exchange roles", "exchange", ("chain",), "P"),
    )
    for label, kind, ways, style in series:
        runs = [run for run in results.get((kind, rates[kind]), {}).values() if run["ways"]]
        scores = [mean_ci(run["ways"][way]["score"] for run in runs) for way in ways]
        tokens = [mean_ci(run["ways"][way]["tokens"] for run in runs).mean for way in ways]
        errors = [0.0 if score.low is None else score.mean - score.low for score in scores]
        if runs:
            axes.errorbar(tokens, [score.mean for score in scores], errors, fmt=style, capsize=3, label=label)
    axes.set_xlabel("generated tokens per query")
    axes.set_ylabel("share of puzzles solved")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
