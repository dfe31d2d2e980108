"""The state of a run, read without locking it: its progress and how it ended."""

from typing import NamedTuple

from launch.run_folder.layout import REJECTED_BATCH_FILE
from launch.run_folder.locks import lock_holder
from launch.run_folder.records import best_evaluation
from launch.run_folder.run import Run

TRAINING, ENDED, DIVERGED, STOPPED = "training", "ended", "diverged", "stopped"
UNREADABLE = "unreadable"
"""States. `stopped`: no process trains the run, which has updates left; those after the latest checkpoint are lost."""


class RunStatus(NamedTuple):
    """The state of a run at one moment.

    `process`, as `123 on host`, trains it, also if it only writes its last files. `update` of `updates` are completed.
    `best` is the highest held-out combined reward of the evaluations that `select_by` chooses from. `written` is the
    time of the last record, in seconds since 1970.
    """

    run: str
    state: str
    process: str | None = None
    task: str | None = None
    update: int | None = None
    updates: int | None = None
    best: float | None = None
    best_update: int | None = None
    written: float | None = None
    problem: str | None = None


def read_status(run: Run) -> RunStatus:
    """Reads the state of a run. Incomplete lines are ignored."""
    # Before the metrics, so that the last records of a process that is just ending are not missed.
    process = lock_holder(run.path)
    settings, lines = run.settings, run.metrics
    update = lines[-1]["update"] if lines else 0
    best_update, best = best_evaluation(lines, settings) or (None, None)
    if process:
        state = TRAINING
    elif lines and update >= settings.num_updates:
        state = ENDED
    else:  # a batch was rejected in the next update, unless the run has resumed since
        state = DIVERGED if any(run.path.glob(REJECTED_BATCH_FILE.format(update + 1, "*"))) else STOPPED
    written = run.metrics_file.path.stat().st_mtime if lines else None
    return RunStatus(
        str(run.path), state, process, settings.task, update, settings.num_updates, best, best_update, written
    )
