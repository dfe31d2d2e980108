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

    from launch.report.listing import Listed


def runs(
    folder: Annotated[
        str | None,
        typer.Argument(metavar="[FOLDER|URI]", parser=path_or_uri, help="Where the runs are. [default: runs]"),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List the runs of a folder, those of studies and the trials of searches in it too.

    States:
      training    a process trains it
      ended       all updates are done
      collapsed   stop_on_collapse ended it
      diverged    a gradient that was not finite ended it
      stopped     nothing trains it, and all that it did is saved: `cory train --resume RUN` continues it
      crashed     nothing trains it, and its updates after the latest checkpoint are lost: --resume continues from there
      unreadable  a file of it is damaged
    A trial of `cory tune` may also have been stopped early by the scheduler, or have failed.

    Examples:
      cory runs
      cory runs runs/study
      cory runs s3://bucket/runs --json
    """
    from launch.display.tables import print_whole
    from launch.report.listing import listed
    from launch.run_folder.layout import RUNS

    found = listed(folder or str(RUNS)) if folder or RUNS.is_dir() else []
    for each in found:
        if each.problem is not None:
            print(f"Warning: {each.problem}", file=sys.stderr)
    if as_json:
        print(json.dumps([each._asdict() for each in found], indent=1))
    elif found:
        print_whole(sys.stdout, _table(found))
    else:
        print(f"There are no runs in {folder or RUNS}.", file=sys.stderr)


def _table(found: list[Listed]) -> Table:
    from launch.display.tables import FINE, show, table

    made = table(["run", "state", "task", "preset"], ["update", "best", "at", "last update"])
    for each in found:
        done = "-" if each.update is None else f"{each.update}/{each.updates}"
        at = "-" if each.best_update is None else str(each.best_update)
        age = "-" if each.written is None else _age(time.time() - each.written)
        best = show(each.best, FINE["combined_reward"])
        made.add_row(each.run, each.state, each.task or "-", each.preset or "-", done, best, at, age)
    return made


def _age(seconds: float) -> str:
    """Returns how long ago something was, in the largest unit of which there is more than one."""
    seconds = max(seconds, 0.0)
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
