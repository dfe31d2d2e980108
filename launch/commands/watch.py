"""`cory watch RUN`: follows a run from another terminal or machine by reading its folder."""

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
"""Exit code if the run is not done and no process is training it."""
POLL_SECONDS = 1.0
"""Seconds between two reads of a run's folder."""


def watch(
    run: RunArgument,
    once: Annotated[bool, typer.Option("--once", help="Print the current state, and exit.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Keep waiting even if no process on this machine is training the run.")
    ] = False,
    debug: Debug = False,
) -> int:
    """Follow a run until it is done: print its progress table, warnings and state.

    Exit codes: 0 the run is done; 1 it is not done and no process is training it; 3 stop_on_collapse ended it; 130
    interrupted by Ctrl-C.
    """
    from launch.display.terminal import Terminal
    from launch.run_folder.status import read_status
    from launch.training.training import EXIT_COLLAPSED

    status = read_status(run)
    with Terminal(status.settings, sys.stdout, bar=not once) as terminal:
        shown_updates: list[Update] = []
        training: bool | None = None

        while True:
            _print_new(terminal, shown_updates, status)
            shown_updates = status.updates
            is_last = once or status.done or not (follow or status.process)
            if terminal.has_bar and not is_last:
                terminal.stage(_state_text(status))
            elif is_last or training != bool(status.process):
                terminal.print(_state_text(status))
            training = bool(status.process)
            if is_last:
                return EXIT_COLLAPSED if status.collapsed else 0 if status.done or status.process else EXIT_NOT_DONE
            time.sleep(POLL_SECONDS)
            status = read_status(run)


def _print_new(terminal: Terminal, shown_updates: list[Update], status: RunStatus) -> None:
    """Prints new updates. A resumed run may have replaced some of the `shown_updates`."""
    pairs = zip(shown_updates, status.updates, strict=False)
    num_unchanged = next(
        (index for index, (old, new) in enumerate(pairs) if old != new), min(len(shown_updates), len(status.updates))
    )
    done = shown_updates[num_unchanged - 1]["update"] if num_unchanged else 0
    terminal.set_settings(status.settings, done)
    if num_unchanged < len(shown_updates):
        terminal.print(f"Resumed after update {done}.")
    previous_warnings = shown_updates[num_unchanged - 1].get("health", []) if num_unchanged else []
    for line in status.updates[num_unchanged:]:
        terminal.update(line)
        for warning in line.get("health", []):
            if _warning_key(warning) not in map(_warning_key, previous_warnings):
                terminal.print(f"Warning: Update {line['update']}: {warning['text']}")
        previous_warnings = line.get("health", [])


def _warning_key(warning: HealthWarning) -> tuple[str, str]:
    return warning["signature"], warning["subject"]


def _state_text(status: RunStatus) -> str:
    """Describes the run's progress, the age of its last update, and the process that trains it."""
    count = status.updates[-1]["update"] if status.updates else 0
    parts = [f"Update {count} of {status.settings.num_updates}"]
    if status.written is not None:
        parts.append(f"{max(time.time() - status.written, 0):.0f} s ago")
    if status.process:
        parts.append(f"training in process {status.process}")
    elif not status.done:
        parts.append("no process on this machine is training it")
    if status.done:
        parts.append("stopped because a policy collapsed" if status.collapsed else "done")
    return ", ".join(parts)
