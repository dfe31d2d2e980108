"""`cory compare RUN RUN`: what sets runs apart, how they ended, and what they took, on the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from launch.console.cli import AsJson, Debug, path_or_uri
from launch.console.errors import CommandError

if TYPE_CHECKING:
    from rich.table import Table

    from launch.display.statistics import Estimate
    from launch.report.runs import ReportedRun

    Ends = dict[str, dict[str, Estimate]]
    """By who answered, each figure."""


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN|STUDY...", parser=path_or_uri, help="Folders or URIs of runs; folders of studies."),
    ],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show in which settings runs differ, their held-out figures at the end, and what they took.

    Figures are of the end of each run, on held-out queries: each policy alone, their mean, and the chain's last
    answer. Of runs with test_queries, 95 % intervals over these queries stand in brackets; else the last evaluation
    has no intervals, and `cory evaluate` gives them. A run's figures are of one seed: `cory report` and `cory study`
    compare over seeds.

    Examples:
      cory compare runs/a runs/b
      cory compare runs/tried/* --json
    """
    from launch.display.tables import print_tables
    from launch.report.runs import read_runs
    from launch.report.tables import final_estimates

    recorded = read_runs(runs)
    if len(recorded) < 2:
        raise CommandError("Name two runs or more to compare.")
    ends = [final_estimates(run) for run in recorded]
    if as_json:
        print(json.dumps(_to_record(recorded, ends), indent=1))
    else:
        print_tables(sys.stdout, *_comparison_tables(recorded, ends))


def _to_record(runs: Sequence[ReportedRun], ends: Sequence[Ends]) -> dict[str, object]:
    from launch.report.runs import differing_values
    from launch.run_folder.records import to_json

    return {
        "settings": differing_values(runs),
        "runs": [
            {
                "run": run.name,
                "state": run.state,
                "update": run.updates[-1]["update"] if run.updates else 0,
                "updates": run.settings.num_updates,
                "held_out_at": run.result.final and run.result.final["update"],
                "held_out": to_json(
                    {who: {name: each._asdict() for name, each in of.items()} for who, of in end.items()}
                ),
                "tokens": run.result.cost["tokens"],
                "seconds": run.result.cost["seconds"],
            }
            for run, end in zip(runs, ends, strict=True)
        ],
    }


def _comparison_tables(runs: Sequence[ReportedRun], ends: Sequence[Ends]) -> list[Table]:
    from launch.display.tables import FINE, MAIN_METRICS, metric_format, table
    from launch.experiments.space import show_value
    from launch.report.runs import differing_values

    settings = table(["setting", *(run.name for run in runs)], [])
    for key, values in differing_values(runs).items():
        settings.add_row(key, *map(show_value, values))
    if not settings.row_count:
        settings = table(["All settings are the same."], [])
    figures = table(["held out", ""], ["update", *(metric_format(name).heading for name in MAIN_METRICS)])
    took = table(["run", "state"], ["update", "response tokens", "seconds of updates"])
    for run, end in zip(runs, ends, strict=True):
        if run.result.final is None:
            figures.add_row(run.name, "not evaluated", *["-"] * (1 + len(MAIN_METRICS)))
        else:
            first = run.name, str(run.result.final["update"])
            for number, (who, estimates) in enumerate(end.items()):
                name, update = ("", "") if number else first
                figures.add_row(name, who, update, *(estimates[metric].shown(FINE[metric]) for metric in MAIN_METRICS))
        done, cost = run.updates[-1]["update"] if run.updates else 0, run.result.cost
        updates = f"{done}/{run.settings.num_updates}"
        took.add_row(run.name, run.state, updates, f"{cost['tokens']:,}", f"{cost['seconds']:,.0f}")
    return [settings, figures, took]
