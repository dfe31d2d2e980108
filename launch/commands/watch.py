"""`cory watch RUN`: follows a run from another terminal or machine, by what it writes into its folder or storage."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from launch.console.cli import Debug, RunArgument

if TYPE_CHECKING:
    from launch.display.terminal import Terminal
    from launch.run_folder.records import HealthWarning, Update
    from launch.run_folder.status import RunStatus

EXIT_NOT_DONE = 1
"""Exit code where nothing trains a run that is not done."""
POLL_SECONDS = 1.0
"""Between two looks at a run's folder."""
STORAGE_POLL_SECONDS = 5.0
"""Between two looks at a run in storage."""


def watch(
    run: RunArgument,
    once: Annotated[bool, typer.Option("--once", help="Show what there is, and exit.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Wait on also while no process on this machine trains the run.")
    ] = False,
    debug: Debug = False,
) -> int:
    """Follow a run: its table, warnings and state, until it is done.

    Exit codes: 0 the run is done; 1 it is not, and nothing is seen to train it; 3 stop_on_collapse ended it; 130 you
    did, by Ctrl-C.

    Of a run in storage a process is seen by its lease, two minutes longer than it lives, so such a run is watched until
    it is done.
    """
    from launch.console.retry import RETRY_SECONDS, retry
    from launch.display.terminal import Terminal
    from launch.run_folder.status import read_status
    from launch.run_folder.storage import StorageError
    from launch.training.training import COLLAPSED

    status = read_status(run)
    with Terminal(status.settings, sys.stdout, bar=not once) as terminal:
        shown: list[Update] = []
        training: bool | None = None

        def tell(error: Exception) -> None:
            terminal.print(f"Warning: {error} Looking again for a minute.")

        while True:
            _show_new(terminal, shown, status)
            shown = status.updates
            last = once or status.done or not (follow or status.process or status.stored)
            if terminal.has_bar and not last:
                terminal.stage(_state_text(status))
            elif last or training != bool(status.process):
                terminal.print(_state_text(status))
            training = bool(status.process)
            if last:
                return COLLAPSED if status.collapsed else 0 if status.done or status.process else EXIT_NOT_DONE
            time.sleep(STORAGE_POLL_SECONDS if status.stored else POLL_SECONDS)
            status = retry(lambda: read_status(run), RETRY_SECONDS, StorageError, tell)


def _show_new(terminal: Terminal, shown: list[Update], status: RunStatus) -> None:
    """Shows the updates that were not shown yet. A run that was resumed may have gone back before those that were."""
    pairs = zip(shown, status.updates, strict=False)
    kept = next((k for k, (old, new) in enumerate(pairs) if old != new), min(len(shown), len(status.updates)))
    done = shown[kept - 1]["update"] if kept else 0
    terminal.set_settings(status.settings, done)
    if kept < len(shown):
        terminal.print(f"Going on after update {done}.")
    before = shown[kept - 1].get("health", []) if kept else []
    for line in status.updates[kept:]:
        terminal.update(line)
        for warning in line.get("health", []):
            if _warning_key(warning) not in map(_warning_key, before):
                terminal.print(f"Warning: Update {line['update']}: {warning['text']}")
        before = line.get("health", [])


def _warning_key(warning: HealthWarning) -> tuple[str, str]:
    return warning["signature"], warning["subject"]


def _state_text(status: RunStatus) -> str:
    """Returns how far the run is, how long ago that was, and who trains it."""
    count = status.updates[-1]["update"] if status.updates else 0
    parts = [f"Update {count} of {status.settings.num_updates}"]
    if status.written is not None:
        parts.append(f"{max(time.time() - status.written, 0):.0f} s ago")
    if status.process:
        parts.append(f"process {status.process} trains it")
    elif not (status.done or status.stored):
        parts.append("no process on this machine trains it")
    if status.done:
        parts.append("stopped, as a policy has collapsed" if status.collapsed else "done")
    return ", ".join(parts)
