"""A run as readers see it: in its folder, or in a copy of what storage has; how far it is, and how it ended."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.console.errors import CommandError
from launch.run_folder import manifest
from launch.run_folder.checkpoints import Checkpoints, name_of
from launch.run_folder.layout import CHECKPOINTS, CONFIG, LEASE, LOCK, REFUSED
from launch.run_folder.lease import Owner
from launch.run_folder.locks import lock_holder
from launch.run_folder.records import Update, best_of
from launch.run_folder.run import Run
from launch.run_folder.storage import CACHED_FILES, REFUSED_FILES, Storage, check_location, is_uri, updates_in
from policies.models.cache import locked
from policies.settings.settings import Settings

TRAINING, ENDED, COLLAPSED, DIVERGED, STOPPED, CRASHED = (
    *("training", "ended", "collapsed", "diverged", "stopped", "crashed"),
)
"""States. `stopped`: nothing trains it, and all that it did is saved. `crashed`: nothing trains it, and updates after
its latest checkpoint are lost, or it has no checkpoint."""


@dataclass(frozen=True)
class RunStatus:
    """What is seen of a run at one moment."""

    settings: Settings
    updates: list[Update]
    written: float | None
    """When the last update was recorded, in seconds since 1970; None before the first."""
    process: str | None
    """The process that trains it, as `123 on host`."""
    stored: bool = False
    """It is in storage, where a process that was killed seems to train it for two minutes more."""
    saved: int = -1
    """The update of its latest checkpoint; -1: there is none."""
    diverged: str | None = None
    """In a sentence, the gradient that ended it, which was not finite."""

    @property
    def update(self) -> int:
        """The updates that are done."""
        return self.updates[-1]["update"] if self.updates else 0

    @property
    def collapsed(self) -> bool:
        """Whether a collapse ended it."""
        return self.settings.stop_on_collapse and any(line.get("collapsed", False) for line in self.updates[-1:])

    @property
    def done(self) -> bool:
        """Whether nothing is left to train."""
        return self.collapsed or any(line["update"] >= self.settings.num_updates for line in self.updates[-1:])

    @property
    def state(self) -> str:
        """One of the states above; a run that is done and writes its last files is `training`."""
        if self.process:
            return TRAINING
        if self.collapsed:
            return COLLAPSED
        if self.done:
            return ENDED
        if self.diverged:
            return DIVERGED
        return STOPPED if self.saved >= max((line["update"] for line in self.updates), default=0) else CRASHED

    @property
    def best(self) -> tuple[int, float] | None:
        """The update of the highest held-out combined reward, by `select_by`, and that; of equals, the earliest."""
        return best_of(self.updates, self.settings)


def read_run(place: str | Path, files: Sequence[str] = CACHED_FILES) -> Run:
    """Returns a run to look at, not locked: its folder, or a copy in the user's cache of what storage has.

    Of the copy's checkpoints only those that are chosen (`Checkpoints.choose`) have files.

    Args:
        place: a folder or a URI. A URI's copy is brought up to date.
        files: what such a copy has, as patterns (`Storage.download`).

    Raises:
        CommandError: there is no run, or the URI holds a password.
        StorageError: storage cannot be read.
    """
    if not is_uri(str(place)):
        return Run.open(place)
    check_location(str(place))
    storage = Storage(str(place))
    if storage.folder is not None:
        return Run.open(storage.folder)
    run = Run(storage.cache("looked-at"), storage)
    run.path.mkdir(parents=True, exist_ok=True)
    lock = locked(run.path / LOCK)

    def fetch(checkpoint: Path, part: str) -> None:
        name = f"{CHECKPOINTS}/{checkpoint.name}"
        with lock:
            storage.download(run.path, [f"{name}/{manifest.NAME}", f"{name}/{part}**"])

    run.checkpoints = Checkpoints(run.checkpoints.folder, run.shown, fetch)
    with lock:
        remote = storage.files()
        storage.download(run.path, files, remote)
        saved = updates_in(remote)
        for update in {*run.checkpoints.updates()}.difference(saved):
            shutil.rmtree(run.checkpoints.place(update))
        for update in saved:
            (run.checkpoints.folder / name_of(update)).mkdir(parents=True, exist_ok=True)
    if not run.exists():
        raise CommandError(f"{storage.uri} is not a run's folder: it has no run's {CONFIG}.")
    return run


def read_status(place: str | Path) -> RunStatus:
    """Reads a run's folder, or what storage has; a line that is just being written is not there yet.

    Raises:
        CommandError: there is no run, or a file of it is damaged.
        StorageError: storage cannot be read.
    """
    run = read_run(place, (*CACHED_FILES, REFUSED_FILES))
    # First: what a process records before it ends must not be missed.
    owner = Owner.read((run.storage or run).read(LEASE))
    process = lock_holder(run.path) if run.storage is None else None
    process = process or (str(owner) if owner is not None and owner.is_alive else None)
    updates = run.updates()
    written = run.metrics.path.stat().st_mtime if updates else None
    stored = is_uri(str(place))
    saved = max(run.checkpoints.updates(), default=-1)
    return RunStatus(run.settings(), updates, written, process, stored, saved, divergence(run))


def divergence(run: Run) -> str | None:
    """Returns in a sentence that a gradient ended a run, which was not finite; None where none did, or it went on."""
    lines = run.updates()
    refused = 1 + (lines[-1]["update"] if lines else 0)
    for file in run.path.glob(REFUSED.format(refused, "*")):
        module = file.stem.removeprefix(Path(REFUSED.format(refused, "")).stem)
        return f"The gradient of {module} was not finite in update {refused}."
    return None
