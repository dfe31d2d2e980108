"""A run's folder: who may write to it, what lies in it, and how a run goes on in it.

config.yaml      every setting, resolved
sources.json     checksums of the queries, models and code that the run is made from
metrics.jsonl    one line per update; line 0 is the held-out evaluation before training
samples.jsonl    responses of the chain, every few updates, and on held-out queries before and after
final.json       with `final_queries`: every response of each policy, alone, after the last update
tensorboard/     the metrics again, for TensorBoard
wandb/           with `wandb`, what Weights & Biases keeps
wandb.id         and the run's id there
mlflow.id        with `mlflow`, the run's id there
trackio.id       with `trackio`, the run's name there
run.id           of a run in storage, what no other run has
checkpoints/     the last few and `best`
log.txt          what libraries and rewards printed
curves.png       drawn at the end, or by `cory plot`
evaluation/      what `cory evaluate` found, a folder each time
"""

import contextlib
import itertools
import re
import shlex
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from launch.console.configuration import as_yaml, read_file
from launch.console.errors import CommandError, FolderError
from launch.run_folder.checkpoints import Checkpoints
from launch.run_folder.journal import Journal, replace_text
from launch.run_folder.layout import (
    CONFIG,
    FINAL,
    LEASE,
    LOCK,
    METRICS,
    MLFLOW_ID,
    ORIGIN,
    RUN_ID,
    SAMPLES,
    SOURCES,
    TENSORBOARD,
    TRACKIO_ID,
    WANDB,
    WANDB_ID,
)
from launch.run_folder.lease import Lease
from launch.run_folder.locks import FolderHandle, NoLocks, lock_folder
from launch.run_folder.records import SampleLine, Update, highest
from policies.settings.settings import Settings, SettingsError, kept_settings

if TYPE_CHECKING:
    from launch.run_folder.storage import Storage


RUNS = Path("runs")
_UNFINISHED = (f".{CONFIG}.new", f".{SOURCES}.new")
"""Where the folders lie of which nobody said where."""


class RunDirectory:
    """One run's folder. Reading needs no lock; `lock` must be held to write."""

    def __init__(self, path: Path) -> None:
        self._set_path(path)
        self.storage: Storage | None = None
        """Where the folder is mirrored to, or copied from."""
        self.lease: Lease | None = None
        """On what it is mirrored to."""
        self._lock: contextlib.ExitStack | None = None
        self._handle: FolderHandle | None = None
        self.new = False
        """Its folder, or the one that it is mirrored to, was made for this run, and goes if that is refused."""

    def _set_path(self, path: Path) -> None:
        self.path = path
        self.metrics = Journal(path / METRICS)
        self.samples = Journal(path / SAMPLES)
        self.checkpoints = Checkpoints(path / "checkpoints")
        self.final = path / FINAL
        self.log = path / "log.txt"
        self.curves = path / "curves.png"

    @classmethod
    def create(cls, path: Path | None, name: str = "") -> "RunDirectory":
        """Makes a new run's folder and locks it.

        Args:
            path: where; None: a fresh folder under `runs/`.
            name: of such a folder.

        Raises:
            CommandError: something is there already, or the folder cannot be made.
        """
        run = cls(path or new_folder(name))
        run.new = path is None or not path.exists()
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommandError(f"The run's folder {run.path} cannot be made: {error.strerror}.") from error
        if not run.exists() and run._entries():
            raise CommandError(f"{run.path} is not empty: empty it, or name another folder with --out.")
        try:
            run.lock()
        except NoLocks:
            run._leave()
            raise
        if run.exists() and run.checkpoints.empty():
            run._clear()
        if run._entries():
            run.unlock()
            raise CommandError(
                f"{run.path} holds a run: go on with it by `{run.resume_command()}`, or name another folder with --out."
            )
        return run

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """Returns the folder of an existing run, not locked.

        Raises:
            CommandError: there is no run in it.
        """
        run = cls(path)
        if not run.exists():
            missing = f"has no run's {CONFIG}" if path.is_dir() else "is a file" if path.exists() else "does not exist"
            raise CommandError(
                f"{path} is not a run's folder: it {missing}. Runs lie under runs/ unless --out said else."
            )
        return run

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file of the folder, or None where there is none of that name."""
        file = self.path / name
        return file.read_bytes() if file.is_file() else None

    def exists(self) -> bool:
        """Tells whether a run was started here: other programs have a file of that name too."""
        return (self.read(CONFIG) or b"").startswith(ORIGIN.encode())

    def lock(self) -> None:
        """Takes the folder for this process, until it ends, unless it has it already.

        And the storage that it is mirrored to: by a lease, and where storage is a folder by its lock, as another
        process may train there without a URI.

        Raises:
            CommandError: another process has it.
            NoLocks: its file system has no locks.
            StorageError: storage cannot be read or written.
        """
        if self._lock is None:
            with contextlib.ExitStack() as taken:
                taken.enter_context(lock_folder(self.path))
                self._handle = taken.enter_context(FolderHandle(self.path))
                if self.storage is not None:
                    locked = False
                    if self.storage.folder is not None:
                        with contextlib.suppress(NoLocks):
                            taken.enter_context(lock_folder(self.storage.folder))
                            locked = True
                    if self.lease is not None:
                        taken.callback(self.lease.release)
                        self.lease.take(locked)
                self._lock = taken.pop_all()

    def unlock(self) -> None:
        """Lets other processes write here again."""
        if self._lock is not None:
            self._lock.close()
            self._lock = self._handle = None

    @property
    def in_place(self) -> bool:
        """Whether the folder is still where it was when it was locked."""
        return self._handle is None or self._handle.in_place()

    def follow(self) -> bool:
        """Takes the path of the locked folder if it was renamed; not of one that is mirrored, which nobody renames.

        Returns:
            Whether it was renamed since this was last asked.

        Raises:
            FolderError: it was removed, or moved to another file system.
        """
        if self._handle is None or self._handle.in_place():
            return False
        path = self._handle.find()
        if self.storage is not None:
            raise FolderError(f"The folder {self.path}, where the run is kept until it is in storage, was renamed.")
        self._set_path(path)
        self._handle.path = path
        return True

    def remove(self) -> None:
        """Removes a locked run that was refused before anything of it was recorded, and the folder made for it."""
        self._clear()
        self._leave()
        self.unlock()

    def _entries(self) -> list[Path]:
        """Returns what lies in the folder, but for what says who may write there, and what a kill left unfinished."""
        entries = (entry for entry in self.path.iterdir() if not entry.name.startswith((LOCK, LEASE)))
        return [entry for entry in entries if entry.name not in _UNFINISHED]

    def _leave(self) -> None:
        """Removes the folder if it was made for this run, and nothing else is in it."""
        if self.new and not self._entries():
            shutil.rmtree(self.path)

    def _clear(self) -> None:
        """Removes a run that ended before anything of it was saved."""
        own = (CONFIG, SOURCES, RUN_ID, self.log.name, self.metrics.path.name, self.samples.path.name)
        files = (*own, WANDB_ID, MLFLOW_ID, TRACKIO_ID, *_UNFINISHED)
        for entry in self.path.iterdir():
            if entry.name in files:
                entry.unlink()
            elif entry.name in (TENSORBOARD, WANDB, self.checkpoints.folder.name):
                shutil.rmtree(entry)

    def write_settings(self, settings: Settings, origin: str) -> None:
        """Writes `config.yaml`; its first lines are the commands that made it, `origin` the latest."""
        file = self.path / CONFIG
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        comments = [line for line in lines if line.startswith("# ")] + [f"# {origin}"]
        replace_text(file, "\n".join(comments) + "\n" + as_yaml(settings))

    def settings(self) -> Settings:
        """Reads `config.yaml`; a setting that came with a later version is as it was then.

        Raises:
            CommandError: it holds something that is no setting, or no setting any more.
        """
        try:
            return kept_settings(read_file(self.path / CONFIG))
        except (CommandError, SettingsError) as error:
            raise CommandError(
                f"{self.path} cannot be read as a run: {error} If another version of cory-rllib wrote {CONFIG} (its "
                "first lines say which), use that one."
            ) from error

    def updates(self) -> list[Update]:
        """Returns the metrics so far, one entry per update."""
        return cast(list[Update], self.metrics.read())

    def best_update(self) -> int | None:
        """Returns the update of the highest held-out combined reward, by `select_by`; of equals, the earliest."""
        best = best_of(self.updates(), self.settings())
        return best and best[0]

    def held_out_samples(self, update: int) -> list[SampleLine]:
        """Returns the chain's responses to the held-out queries after `update`."""
        samples = cast(list[SampleLine], self.samples.read())
        return [sample for sample in samples if sample["held_out"] and sample["update"] == update]

    def cut_after(self, update: int) -> None:
        """Forgets what was recorded after `update`, where training goes on, and what was left unfinished."""
        self.checkpoints.clean()
        self.metrics.cut_after(update)
        self.samples.cut_after(update)

    def resume_command(self) -> str:
        """Returns the command that continues this run."""
        return f"cory train --resume {shlex.quote(self.shown(self.path))}"

    def shown(self, path: Path) -> str:
        """Returns how a user finds a path of this folder: in storage, if the run is mirrored there."""
        if self.storage is None:
            return str(path)
        return self.storage.uri if path == self.path else self.storage.below(path.relative_to(self.path).as_posix())

    def reached(self) -> int:
        """Returns the update of the latest checkpoint, here or in storage; -1 where there is none.

        Raises:
            StorageError: storage cannot be read.
        """
        there = [] if self.storage is None else self.storage.updates(self.storage.names())
        return max([*self.checkpoints.updates(), *there], default=-1)

    def bring(self) -> None:
        """Copies the latest whole checkpoint from storage, if the run has one there and none here.

        Raises:
            StorageError: storage cannot be read.
        """
        if self.storage is not None and self.checkpoints.empty():
            self.storage.fetch_checkpoint(self.path)

    def mirror(self, keep: int) -> None:
        """Copies what is new to storage, if the run has one, where the latest `keep` checkpoints and the best stay.

        Raises:
            Lost: another process writes there now.
            StorageError: storage cannot be written.
        """
        if self.storage is not None:
            if self.lease is not None:
                self.lease.renew()
            self.storage.push(self.path, keep, self.best_update())


def best_of(lines: Sequence[Update], settings: Settings) -> tuple[int, float] | None:
    """Returns the update of the highest held-out combined reward, by `select_by`, and that; of equals, the earliest."""
    return highest({line["update"]: settings.worth(line) for line in lines if "evaluation" in line})


def new_folder(name: str) -> Path:
    """Makes a fresh folder under `runs/`, after a name and the time. Processes that ask at once get one each.

    Raises:
        CommandError: it cannot be made.
    """
    plain = re.sub(r"[^\w.-]+", "-", name)
    base = RUNS / f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not RUNS.is_dir():
                raise CommandError(f"{RUNS} is a file: move it, or name a folder with --out.") from None
        except OSError as error:
            raise CommandError(f"The folder {path} cannot be made: {error.strerror}.") from error
        else:
            break
    return path
