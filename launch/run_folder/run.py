"""A run in a folder: locking, creating, opening and reading it."""

import contextlib
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Self, cast

from cory_env.home import expand_home, upload_hint
from launch.console.configuration import read_file, settings_to_yaml
from launch.console.errors import CommandError, make_folder
from launch.run_folder.checkpoints import Checkpoints, remove_all
from launch.run_folder.journal import Journal
from launch.run_folder.layout import (
    CHECKPOINTS,
    CONFIG,
    CONFIG_HEADER,
    CURVES,
    FINAL,
    LOCK,
    LOG,
    METRICS,
    SAMPLES,
    STARTED_FILES,
    new_folder,
)
from launch.run_folder.locks import lock_folder
from launch.run_folder.records import SampleLine, Update, best_evaluation
from launch.run_folder.storage import reject_uri
from policies.files import atomic_write
from policies.settings.settings import Settings, SettingsError, make_settings

if TYPE_CHECKING:
    import pandas as pd


class Run:
    """One run. Reading needs no lock; writing requires `lock`."""

    def __init__(self, path: Path) -> None:
        """Initializes the run without reading or creating anything; its folder may not exist yet."""
        self.path = path
        self.metrics_file = Journal(path / METRICS)
        self.samples_file = Journal(path / SAMPLES)
        self.checkpoints = Checkpoints(path / CHECKPOINTS)
        self.final = path / FINAL
        self.log = path / LOG
        self.curves = path / CURVES
        self._lock: contextlib.ExitStack | None = None
        self._lock_file: os.stat_result | None = None
        self._settings: Settings | None = None
        self._best: tuple[int, float] | None = None  # of the updates that this process has recorded
        self._is_new = False  # whether its folder was created for it; `abort` then removes the folder too
        self.keep_local = False
        """Whether a run in storage also stays in its local folder when it ends."""

    @classmethod
    def create(cls, location: str | Path | None, name: str = "") -> Self:
        """Creates and locks a new run in a folder; None: a new folder `runs/NAME-TIME`."""
        run = cls(new_folder(name) if location is None else Path(location))
        run._is_new = location is None or not run.path.exists()
        make_folder(run.path)
        if not run.exists() and run._entries():
            raise CommandError(f"{run.path} is not empty. Empty it, or choose another folder with --out.")
        run.lock()
        if run.exists() and run.checkpoints.empty():
            run._remove_started_files()
        if run._entries():
            run.unlock()
            raise CommandError(
                f"{run.path} already has a run. Resume it with `{run.resume_command()}`, or choose another folder with "
                "--out."
            )
        return run

    @classmethod
    def open(cls, location: str | Path) -> Self:
        """Opens an existing run in a folder, without locking it."""
        reject_uri(str(location))
        path = Path(expand_home(str(location)))
        run = cls(path)
        if run.exists():
            return run
        problem = f"has no run's {CONFIG}" if path.is_dir() else "is a file" if path.exists() else "does not exist"
        hint = "" if path.exists() else upload_hint(path)
        raise CommandError(f"{path} is not a run's folder: it {problem}. By default, runs are in runs/.{hint}")

    @classmethod
    def is_started(cls, location: str) -> bool:
        """Whether a location has a run with a checkpoint."""
        run = cls(Path(location))
        return run.exists() and not run.checkpoints.empty()

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file in the folder, or None if it does not exist."""
        file = self.path / name
        return file.read_bytes() if file.is_file() else None

    def exists(self) -> bool:
        """Whether a run was started here. Other programs' `config.yaml` does not count."""
        return is_config(self.read(CONFIG))

    def lock(self) -> None:
        """Locks the run for this process until `unlock` or the end of the process. Does nothing if it is locked."""
        if self._lock is None:
            make_folder(self.path)
            self._lock = lock_folder(self.path)
            self._lock_file = (self.path / LOCK).stat()

    def unlock(self) -> None:
        """Releases the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = self._lock_file = None

    def write_settings(self, settings: Settings, origin: str) -> None:
        """Writes `config.yaml`. `origin`, the command that starts or resumes the run, becomes a comment at its top."""
        file = self.path / CONFIG
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        comments = [line for line in lines if line.startswith("# ")] + [f"# {' '.join(origin.splitlines())}"]
        atomic_write(file, "\n".join(comments) + "\n" + settings_to_yaml(settings))
        self._settings = None

    @property
    def settings(self) -> Settings:
        """All settings of the run, read once."""
        try:
            if self._settings is None:
                self._settings = make_settings(read_file(self.path / CONFIG, recorded=True))
            return self._settings
        except (CommandError, SettingsError) as error:
            raise CommandError(
                f"{self.path} cannot be read as a run: {error} If another version of cory-rllib wrote {CONFIG} (see "
                "its first lines), use that version."
            ) from error

    @property
    def metrics(self) -> list[Update]:
        """Lines of `metrics.jsonl`, one per update; line 0 is the evaluation before training.

        Each is a dictionary with the keys of `Report` except `samples`; non-finite numbers are None.
        """
        return cast(list[Update], self.metrics_file.read())

    @property
    def samples(self) -> list[SampleLine]:
        """Lines of `samples.jsonl`: responses of the chain with their update, and whether the query is held out."""
        return cast(list[SampleLine], self.samples_file.read())

    def frame(self) -> "pd.DataFrame":
        """Returns all metrics as a data frame with a row per number (`launch.run_folder.frame`)."""
        from launch.run_folder.frame import metrics_frame

        return metrics_frame(self.metrics)

    @property
    def best_update(self) -> int | None:
        """Update with the best held-out score (see `select_by`), the earliest if equal; None if none was evaluated."""
        best = self._best or best_evaluation(self.metrics, self.settings)
        return best and best[0]

    def record(self, line: Update) -> None:
        """Appends the metrics of an update."""
        best = self._best or best_evaluation(self.metrics, self.settings)
        self.metrics_file.append(line)
        evaluated = best_evaluation([line], self.settings)
        self._best = evaluated if evaluated and (best is None or evaluated[1] > best[1]) else best

    def cut_after(self, update: int) -> None:
        """Removes records after `update`, from which training resumes, and unfinished checkpoints."""
        self.checkpoints.clean()
        self.metrics_file.cut_after(update)
        self.samples_file.cut_after(update)
        self._best = None

    def resume_command(self) -> str:
        """Returns the command that resumes this run."""
        return f"cory train --resume {shlex.quote(self.location)}"

    @property
    def location(self) -> str:
        """The run's folder, or the URI of a run in storage."""
        return self.user_path()

    def user_path(self, name: str = "") -> str:
        """Returns the path of a file of the run as shown to users: a URI if the run is in storage."""
        return str(self.path / name)

    def latest_checkpoint(self) -> int:
        """Returns the update of the latest checkpoint, local or in storage; -1 if there is none."""
        return max(self.checkpoints.updates(), default=-1)

    def take_over(self) -> None:
        """Makes this process the only writer of a run in storage, and its folder as new as storage."""

    def upload(self, best: int | None = None, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Uploads new files of a run in storage; `StoredRun` has the details."""

    def finish_upload(self) -> None:
        """Uploads the rest of a run in storage that has ended or failed."""

    def remove_local(self) -> None:
        """Removes the local folder of a run that is completely in storage, and unlocks it."""

    def abort(self) -> None:
        """Removes a locked run that failed before its first record, and unlocks it.

        Does nothing if the folder is gone: another run may have its path, and records are unknown.
        """
        if not self.metrics_file.path.exists() and self.checkpoints.empty() and self._folder_unchanged():
            self._remove_new()
            self.unlock()

    def _remove_new(self) -> None:
        """Removes a run that has no records, and its folder if that was created for it."""
        self._remove_started_files()
        if self._is_new and not self._entries():
            shutil.rmtree(self.path)

    def _remove_started_files(self) -> None:
        """Removes a run that ended before its first checkpoint."""
        remove_all(self.path / name for name in STARTED_FILES)

    def _folder_unchanged(self) -> bool:
        """Whether the locked folder still has its path."""
        file = self.path / LOCK  # held open, so no other file gets its inode
        return self._lock_file is not None and file.exists() and os.path.samestat(self._lock_file, file.stat())

    def _entries(self) -> list[Path]:
        """Returns the folder's entries except locks and unfinished writes."""
        return [path for path in self.path.iterdir() if not path.name.startswith(LOCK) and path.suffix != ".new"]


def is_config(content: bytes | None) -> bool:
    """Whether this is the content of a run's `config.yaml`."""
    return content is not None and content.startswith(CONFIG_HEADER.encode())
