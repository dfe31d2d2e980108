"""Reading a run without locking it, from its folder or a copy of storage: its progress and how it ended."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.console.errors import CommandError
from launch.run_folder import manifest
from launch.run_folder.checkpoints import Checkpoints, checkpoint_name
from launch.run_folder.layout import CHECKPOINTS, CONFIG, LEASE, LOCK, REJECTED_BATCH_FILE
from launch.run_folder.lease import Owner
from launch.run_folder.locks import lock_holder
from launch.run_folder.records import Update, best_evaluation
from launch.run_folder.run import Run
from launch.run_folder.storage import (
    CACHED_FILES,
    REJECTED_FILES,
    Storage,
    check_location,
    checkpoint_updates,
    is_uri,
)
from policies.models.cache import file_lock
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
    """The process that trains the run, as `123 on host`; None if there is none.

    If the run is in storage, a killed process still counts as training for two minutes.
    """
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


def read_run(location: str | Path, files: Sequence[str] = CACHED_FILES) -> Run:
    """Opens a run for reading, without a lock.

    A run in storage is read from a copy in the user's cache, which is updated first. The copy's checkpoints are
    downloaded only when they are chosen (`Checkpoints.choose`).

    Args:
        location: a folder or a URI.
        files: patterns of the files that the copy contains (`Storage.download`).

    Raises:
        CommandError: there is no run, or the URI contains a password.
        StorageError: storage cannot be read.
    """
    if not is_uri(str(location)):
        return Run.open(location)
    check_location(str(location))
    storage = Storage(str(location))
    if storage.folder is not None:
        return Run.open(storage.folder)
    run = Run(storage.cache("downloads"), storage)
    run.path.mkdir(parents=True, exist_ok=True)
    lock = file_lock(run.path / LOCK)

    def fetch(checkpoint: Path, part: str) -> None:
        name = f"{CHECKPOINTS}/{checkpoint.name}"
        with lock:
            storage.download(run.path, [f"{name}/{manifest.NAME}", f"{name}/{part}**"])

    run.checkpoints = Checkpoints(run.checkpoints.folder, run.user_path, fetch)
    with lock:
        remote = storage.files()
        storage.download(run.path, files, remote)
        saved = checkpoint_updates(remote)
        for update in {*run.checkpoints.updates()}.difference(saved):
            shutil.rmtree(run.checkpoints.path_of(update))
        for update in saved:
            (run.checkpoints.folder / checkpoint_name(update)).mkdir(parents=True, exist_ok=True)
    if not run.exists():
        raise CommandError(f"{storage.uri} is not a run's folder: it has no run's {CONFIG}.")
    return run


def read_status(location: str | Path) -> RunStatus:
    """Reads the state of a run. Incomplete lines are ignored.

    Args:
        location: the run's folder or URI.

    Raises:
        CommandError: there is no run, or one of its files is damaged.
        StorageError: storage cannot be read.
    """
    run = read_run(location, (*CACHED_FILES, REJECTED_FILES))
    # Before the updates, so that the last records of a process that is just ending are not missed.
    owner = Owner.read((run.storage or run).read(LEASE))
    process = lock_holder(run.path) if run.storage is None else None
    process = process or (str(owner) if owner is not None and owner.is_alive else None)
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
