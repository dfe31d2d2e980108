"""`cory compare RUN RUN`: prints how runs differ in settings, results and cost."""

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

    FinalEstimates = dict[str, dict[str, Estimate]]
    """By policy id, `mean` or `last answer`, then by metric."""


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN|STUDY...", parser=path_or_uri, help="Folders or URIs of runs; folders of studies."),
    ],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the settings in which runs differ, their final held-out metrics, and their cost.

    Metrics are measured at the end of each run, on held-out queries: for each policy alone, as their mean, and for the
    chain's last response. Runs with test_queries have 95 % intervals over these queries, in brackets. Other runs show
    their last evaluation without intervals; `cory evaluate` computes them. Each run is a single seed: to compare over
    seeds, use `cory report` or `cory study`.

    Examples:
      cory compare runs/a runs/b
      cory compare runs/tried/* --json
    """
    from launch.display.tables import print_tables
    from launch.report.runs import read_runs
    from launch.report.tables import final_estimates

    reported_runs = read_runs(runs)
    if len(reported_runs) < 2:
        raise CommandError("Name at least two different runs.")
    estimates = [final_estimates(run) for run in reported_runs]
    if as_json:
        print(json.dumps(_to_record(reported_runs, estimates), indent=1))
    else:
        print_tables(sys.stdout, *_comparison_tables(reported_runs, estimates))


def _to_record(runs: Sequence[ReportedRun], estimates: Sequence[FinalEstimates]) -> dict[str, object]:
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
                    {
                        name: {metric: estimate._asdict() for metric, estimate in by_metric.items()}
                        for name, by_metric in run_estimates.items()
                    }
                ),
                "tokens": run.result.cost["tokens"],
                "seconds": run.result.cost["seconds"],
            }
            for run, run_estimates in zip(runs, estimates, strict=True)
        ],
    }


def _comparison_tables(runs: Sequence[ReportedRun], estimates: Sequence[FinalEstimates]) -> list[Table]:
    from launch.display.tables import FINE_PATTERNS, MAIN_METRICS, metric_format, new_table
    from launch.experiments.space import format_setting_value
    from launch.report.runs import differing_values

    settings = new_table(["setting", *(run.name for run in runs)], [])
    for key, values in differing_values(runs).items():
        settings.add_row(key, *map(format_setting_value, values))
    if not settings.row_count:
        settings = new_table(["All settings are equal."], [])
    figures = new_table(["held out", ""], ["update", *(metric_format(name).heading for name in MAIN_METRICS)])
    costs = new_table(["run", "state"], ["update", "response tokens", "seconds of updates"])
    for run, run_estimates in zip(runs, estimates, strict=True):
        if run.result.final is None:
            figures.add_row(run.name, "not evaluated", *["-"] * (1 + len(MAIN_METRICS)))
        else:
            first = run.name, str(run.result.final["update"])
            for index, (policy, by_metric) in enumerate(run_estimates.items()):
                name, update = ("", "") if index else first
                cells = [by_metric[metric].format(FINE_PATTERNS[metric]) for metric in MAIN_METRICS]
                figures.add_row(name, policy, update, *cells)
        done, cost = run.updates[-1]["update"] if run.updates else 0, run.result.cost
        updates = f"{done}/{run.settings.num_updates}"
        costs.add_row(run.name, run.state, updates, f"{cost['tokens']:,}", f"{cost['seconds']:,.0f}")
    return [settings, figures, costs]
