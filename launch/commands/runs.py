"""`cory runs`: lists the runs in a folder with their state and progress."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launch.console.cli import AsJson, Debug, path_or_uri
from launch.console.errors import CommandError

if TYPE_CHECKING:
    from rich.table import Table

    from launch.run_folder.run import Run
    from launch.run_folder.status import RunStatus


def runs(
    folder: Annotated[
        str | None,
        typer.Argument(metavar="[FOLDER]", parser=path_or_uri, help="Folder with runs. [default: runs]"),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List the runs in a folder, including the runs of studies.

    States:
      training    a process is training it
      ended       all updates are done
      diverged    ended by a non-finite gradient
      stopped     no process is training it; `cory train --resume RUN` continues it from its latest checkpoint
      unreadable  one of its files is damaged

    Examples:
      cory runs
      cory runs runs/study
      cory runs /shared/runs --json
    """
    from launch.display.tables import print_tables
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


def _runs_table(statuses: list[RunStatus]) -> Table:
    from launch.display.tables import FINE_PATTERNS, format_number, new_table

    rows = [
        [
            status.run,
            status.state,
            status.task or "-",
            "-" if status.update is None else f"{status.update}/{status.updates}",
            format_number(status.best, FINE_PATTERNS["combined_reward"]),
            "-" if status.best_update is None else str(status.best_update),
            "-" if status.written is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(status.written)),
        ]
        for status in statuses
    ]
    return new_table(["run", "state", "task"], ["update", "best", "at", "last update"], rows)


def list_runs(location: str) -> list[RunStatus]:
    """Returns the runs below a folder, sorted by the time of their last update."""
    from launch.run_folder.layout import CONFIG
    from launch.run_folder.run import Run
    from launch.run_folder.storage import reject_uri

    reject_uri(location)
    folder = Path(location)
    if not folder.is_dir():
        raise CommandError(f"{location} {'is a file' if folder.exists() else 'does not exist'}. Pass a folder of runs.")
    run_list: list[Run] = []
    for path in sorted((file.parent for file in folder.rglob(CONFIG)), key=lambda path: len(path.parts)):
        # A run's folder may contain copies of runs.
        if not any(path.is_relative_to(outer.path) for outer in run_list) and Run(path).exists():
            run_list.append(Run(path))
    return sorted(map(_read_status, run_list), key=lambda run: (run.written or 0.0, run.run))


def _read_status(run: Run) -> RunStatus:
    from launch.run_folder.status import UNREADABLE, RunStatus, read_status

    try:
        return read_status(run)
    except CommandError as error:
        return RunStatus(str(run.path), UNREADABLE, problem=str(error))
