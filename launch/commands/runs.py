"""`cory runs`: lists the runs in a folder or storage with their state and progress."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from launch.console.cli import AsJson, Debug, path_or_uri

if TYPE_CHECKING:
    from rich.table import Table

    from launch.report.listing import ListedRun


def runs(
    folder: Annotated[
        str | None,
        typer.Argument(metavar="[FOLDER|URI]", parser=path_or_uri, help="Folder or storage with runs. [default: runs]"),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List the runs in a folder or storage, including the runs of studies.

    States:
      training    a process is training it
      ended       all updates are done
      collapsed   ended by stop_on_collapse
      diverged    ended by a non-finite gradient
      stopped     no process is training it; `cory train --resume RUN` continues it from its latest checkpoint
      unreadable  one of its files is damaged

    Examples:
      cory runs
      cory runs runs/study
      cory runs s3://bucket/runs --json
    """
    from launch.display.tables import print_tables
    from launch.report.listing import list_runs
    from launch.run_folder.layout import RUNS

    rows = list_runs(folder or str(RUNS)) if folder or RUNS.is_dir() else []
    for row in rows:
        if row.problem is not None:
            print(f"Warning: {row.problem}", file=sys.stderr)
    if as_json:
        print(json.dumps([row._asdict() for row in rows], indent=1))
    elif rows:
        print_tables(sys.stdout, _runs_table(rows))
    else:
        print(f"No runs found in {folder or RUNS}.", file=sys.stderr)


def _runs_table(rows: list[ListedRun]) -> Table:
    from launch.display.tables import FINE_PATTERNS, format_number, new_table

    rich_table = new_table(["run", "state", "task"], ["update", "best", "at", "last update"])
    for row in rows:
        done = "-" if row.update is None else f"{row.update}/{row.updates}"
        at = "-" if row.best_update is None else str(row.best_update)
        written = "-" if row.written is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(row.written))
        rich_table.add_row(
            row.run,
            row.state,
            row.task or "-",
            done,
            format_number(row.best, FINE_PATTERNS["combined_reward"]),
            at,
            written,
        )
    return rich_table
