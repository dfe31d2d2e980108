"""A run in storage: it works in a folder of the user's cache, and is uploaded after each checkpoint.

The folder's lock prevents a second process on this machine, the writer's id (`Storage`) one on another machine.
The run's id shows whether the folder and storage have the same run; the one with the later checkpoint is continued.
"""

import contextlib
import platform
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Self

from launch.console.errors import CommandError
from launch.run_folder import manifest
from launch.run_folder.checkpoints import checkpoint_name, remove_all
from launch.run_folder.layout import CHECKPOINTS, CONFIG, LOCK, RUN_ID, WRITER
from launch.run_folder.run import Run, is_config
from launch.run_folder.storage import Storage, StorageError, WriterChangedError, is_uri
from policies.files import atomic_write


class StoredRun(Run):
    """One run in storage. Methods that read or write storage raise a `StorageError` if they cannot."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage.cache())
        self.storage = storage

    @classmethod
    def create(cls, location: str | Path | None, name: str = "") -> Self:
        """Creates a run at a URI that has none with a checkpoint: locks its local folder, and takes storage over."""
        run = cls(Storage(str(location)))
        run.lock()
        try:
            if run._has_checkpoint():
                raise CommandError(
                    f"{location} already has a run, in storage or in {run.path} on {platform.node()}. Resume it with "
                    f"`{run.resume_command()}`, or choose another location with --out."
                )
            run.storage.take_over()
            run.storage.clear()  # files of a run that ended before its first checkpoint
        except CommandError:
            run.unlock()
            raise
        run._clear()
        atomic_write(run.path / RUN_ID, secrets.token_hex(8))
        return run

    @classmethod
    def open(cls, location: str | Path) -> Self:
        """Opens and locks an existing run, to resume it. This only reads storage; `take_over` follows."""
        run = cls(Storage(str(location)))
        if not run._has_checkpoint():
            raise CommandError(
                f"{location} has no run with a checkpoint to resume from. Correct the URI, or start a new run."
            )
        run.lock()
        run._download_newer(max(run.checkpoints.updates(), default=-1))
        return run

    @classmethod
    def is_started(cls, location: str) -> bool:
        """Whether a URI has a run with a checkpoint, possibly one that is not uploaded yet."""
        return cls(Storage(location))._has_checkpoint()

    def user_path(self, name: str = "") -> str:
        return self.storage.uri_of(name)

    def latest_checkpoint(self) -> int:
        return max([super().latest_checkpoint(), *self.storage.updates()])

    def take_over(self) -> None:
        """Makes this process the only writer, then downloads the run, or uploads it if the local folder is newer."""
        self.storage.take_over()
        if self._download_newer(self.checkpoints.latest_valid()):
            self.storage.download_checkpoint(self.path)
        else:
            self.upload()

    def cut_after(self, update: int) -> None:
        """Removes records and checkpoints after `update`; those in storage with the next upload."""
        super().cut_after(update)
        self.storage.resumed_after = update

    def upload(self, best: int | None = None, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Uploads the run, and removes old checkpoints from storage (`keep_checkpoints`).

        Args:
            best: update of the best checkpoint, which is kept; None: the best one in the metrics.
        """
        best = self.best_update if best is None else best
        self.storage.upload(self.path, self.settings.keep_checkpoints, best, cancelled)

    def finish_upload(self) -> None:
        """Uploads the rest of a run that has ended or failed. An error says where it is and how to upload it."""
        try:
            self.upload()
        except StorageError as error:
            raise StorageError(
                f"{error} Nothing is lost: the run is in {self.path} on {platform.node()}. When storage is writable "
                f"again, run `{self.resume_command()}` on that machine to upload it."
            ) from error

    def remove_local(self) -> None:
        (self.path / RUN_ID).unlink(missing_ok=True)  # so an interrupted removal does not look like the run
        shutil.rmtree(self.path.parent)
        self.unlock()

    def _remove_new(self) -> None:
        with contextlib.suppress(StorageError, WriterChangedError):
            self.storage.clear()
            self.storage.remove(WRITER)
        self.remove_local()

    def _has_checkpoint(self) -> bool:
        if self.storage.files() and not is_config(self.storage.read(CONFIG)):
            raise CommandError(f"{self.storage.uri} is not empty and has no run. Empty it, or choose another location.")
        return bool(self.storage.updates()) or not self.checkpoints.empty()

    def _download_newer(self, local: int) -> bool:
        """Replaces the local folder by the files in storage, without checkpoints, unless it is as new or newer.

        `local` is the update of its latest checkpoint; -1 if there is none. Returns whether it was replaced.
        """
        local = local if self.read(RUN_ID) == self.storage.read(RUN_ID) else -1
        remote = max(self.storage.updates(), default=-1)
        latest = f"{CHECKPOINTS}/{checkpoint_name(local)}/{manifest.NAME}"
        # At equal updates: another machine may have resumed from an earlier checkpoint and repeated the last update.
        if remote < 0 or local > remote or (local == remote and self.read(latest) == self.storage.read(latest)):
            return False
        self._clear()
        self.storage.download(self.path)
        return True

    def _clear(self) -> None:
        """Removes everything in the local folder except its lock; first the id, in case of a kill."""
        (self.path / RUN_ID).unlink(missing_ok=True)
        self._settings = self._best = None
        remove_all(path for path in self.path.iterdir() if not path.name.startswith(LOCK))


def run_type(location: str | None) -> type[Run]:
    """Returns the class of the run at a folder or URI."""
    return StoredRun if location is not None and is_uri(location) else Run
