"""`cory runs`: the runs of a folder, how each stands, and how far it has come."""

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
        typer.Argument(metavar="[FOLDER|URI]", parser=path_or_uri, help="Where the runs are. [default: runs]"),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List the runs of a folder, those of studies in it too.

    States:
      training    a process trains it
      ended       all updates are done
      collapsed   stop_on_collapse ended it
      diverged    a gradient that was not finite ended it
      stopped     nothing trains it, and all that it did is saved: `cory train --resume RUN` continues it
      crashed     nothing trains it, and its updates after the latest checkpoint are lost: --resume continues from there
      unreadable  a file of it is damaged

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
        print(f"There are no runs in {folder or RUNS}.", file=sys.stderr)


def _runs_table(rows: list[ListedRun]) -> Table:
    from launch.display.tables import FINE, format_number, table

    made = table(["run", "state", "task"], ["update", "best", "at", "last update"])
    for row in rows:
        done = "-" if row.update is None else f"{row.update}/{row.updates}"
        at = "-" if row.best_update is None else str(row.best_update)
        written = "-" if row.written is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(row.written))
        made.add_row(
            row.run, row.state, row.task or "-", done, format_number(row.best, FINE["combined_reward"]), at, written
        )
    return made
