"""The state of a run, read without locking it: its progress and how it ended."""

from dataclasses import dataclass
from pathlib import Path

from launch.run_folder.layout import REJECTED_BATCH_FILE
from launch.run_folder.locks import lock_holder
from launch.run_folder.records import Update, best_evaluation
from launch.run_folder.run import Run
from policies.settings.settings import Settings

TRAINING, ENDED, COLLAPSED, DIVERGED, STOPPED = "training", "ended", "collapsed", "diverged", "stopped"
"""States. `stopped`: no process trains the run, which has updates left; those after the latest checkpoint are lost."""


@dataclass(frozen=True)
class RunStatus:
    """The state of a run at one moment."""

    settings: Settings
    updates: list[Update]
    written: float | None
    """When the last update was recorded, in seconds since 1970; None before the first."""
    process: str | None
    """The process that trains the run, as `123 on host`; None if there is none."""
    diverged: str | None = None
    """A sentence about the gradient that was not finite and ended the run; None if there was none."""

    @property
    def update(self) -> int:
        """The number of finished updates."""
        return self.updates[-1]["update"] if self.updates else 0

    @property
    def collapsed(self) -> bool:
        """Whether a collapse ended the run."""
        return self.settings.stop_on_collapse and any(line.get("collapsed", False) for line in self.updates[-1:])

    @property
    def done(self) -> bool:
        """Whether the run has finished all of its updates, or collapsed."""
        return self.collapsed or any(line["update"] >= self.settings.num_updates for line in self.updates[-1:])

    @property
    def state(self) -> str:
        """One of the states above. A finished run that still writes its last files is `training`."""
        if self.process:
            return TRAINING
        if self.collapsed:
            return COLLAPSED
        if self.done:
            return ENDED
        return DIVERGED if self.diverged else STOPPED

    @property
    def best(self) -> tuple[int, float] | None:
        """The update with the best held-out score (see `select_by`), and that score; the earliest if equal."""
        return best_evaluation(self.updates, self.settings)


def read_status(location: str | Path) -> RunStatus:
    """Reads the state of the run in a folder. Incomplete lines are ignored."""
    run = Run.open(location)
    # Before the updates, so that the last records of a process that is just ending are not missed.
    process = lock_holder(run.path)
    updates = run.updates()
    last_write = run.metrics.path.stat().st_mtime if updates else None
    return RunStatus(run.settings(), updates, last_write, process, divergence(run))


def divergence(run: Run) -> str | None:
    """Returns a sentence about the non-finite gradient that ended a run; None if there was none, or it resumed."""
    lines = run.updates()
    rejected = 1 + (lines[-1]["update"] if lines else 0)
    for file in run.path.glob(REJECTED_BATCH_FILE.format(rejected, "*")):
        policy_id = file.stem.removeprefix(Path(REJECTED_BATCH_FILE.format(rejected, "")).stem)
        return f"The gradient of {policy_id} was not finite in update {rejected}."
    return None
