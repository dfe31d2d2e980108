"""A run in a local folder or in storage: locking, creating, opening, reading and uploading it.

A run in storage works in a folder of the user's cache. `upload` copies new files from there to storage.
"""

import contextlib
import os
import platform
import secrets
import shlex
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

from cory_env.home import upload_hint
from launch.console.configuration import read_file, settings_to_yaml
from launch.console.errors import CommandError, make_folder
from launch.run_folder import manifest
from launch.run_folder.checkpoints import Checkpoints, checkpoint_name
from launch.run_folder.journal import Journal, atomic_write
from launch.run_folder.layout import (
    CHECKPOINTS,
    CONFIG,
    CONFIG_HEADER,
    CURVES,
    FINAL,
    LOCK,
    LOG,
    METRICS,
    RUN_ID,
    SAMPLES,
    STARTED_FILES,
    WRITERS,
    new_folder,
)
from launch.run_folder.lease import Lease, LeaseLostError
from launch.run_folder.locks import LocksUnsupportedError, lock_folder
from launch.run_folder.records import Update, best_evaluation
from launch.run_folder.storage import Storage, StorageError, checkpoint_updates, is_uri
from policies.settings.removed import recorded_settings
from policies.settings.settings import Settings, SettingsError


class Run:
    """One run. Reading needs no lock; writing requires `lock`."""

    def __init__(self, path: Path, storage: Storage | None = None) -> None:
        """Initializes the run without reading or creating anything.

        Args:
            path: the run's folder, which may not exist yet.
            storage: the storage that the run is uploaded to, or was copied from.
        """
        self.path = path
        self.metrics = Journal(path / METRICS)
        self.samples = Journal(path / SAMPLES)
        self.checkpoints = Checkpoints(path / CHECKPOINTS)
        self.final = path / FINAL
        self.log = path / LOG
        self.curves = path / CURVES
        self.storage = storage
        self._lock: contextlib.ExitStack | None = None
        self._lock_file: os.stat_result | None = None
        self._lease: Lease | None = None
        self._is_new = False  # whether its folder was created for it; `abort` then removes the folder too

    @classmethod
    def create(cls, location: str | Path | None, name: str = "") -> "Run":
        """Creates and locks a new run's folder.

        Args:
            location: a folder or a URI; None: a new folder under `runs/`.
            name: the beginning of that new folder's name.

        Raises:
            CommandError: the folder is not empty, cannot be created, or is in use by another process.
            StorageError: storage cannot be read or written.
        """
        if location is not None and is_uri(str(location)):
            return cls._create_in_storage(str(location))
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
    def _create_in_storage(cls, uri: str) -> "Run":
        storage = Storage(uri)
        _check_not_started(storage)  # before anything is changed
        run = cls._lock_storage(storage)
        try:
            _check_not_started(storage)  # another process may have started one and ended since
        except CommandError:
            run.unlock()
            raise
        storage.clear()  # files of a run that ended before its first checkpoint
        _clear_folder(run.path)
        (run.path / RUN_ID).write_text(secrets.token_hex(8))
        return run

    @classmethod
    def open(cls, location: str | Path) -> "Run":
        """Opens an existing run to resume it.

        A run in a folder is not locked yet; a run in storage is. If the local copy of a run in storage is as new as
        storage or newer, it is uploaded. Otherwise everything but the checkpoint is downloaded (see
        `download_checkpoint`).

        Raises:
            CommandError: there is no run, the run in storage has no checkpoint, or another process trains it.
            StorageError: storage cannot be read or written.
        """
        if is_uri(str(location)):
            return cls._open_in_storage(str(location))
        run, path = cls(Path(location)), Path(location)
        if run.exists():
            return run
        problem = f"has no run's {CONFIG}" if path.is_dir() else "is a file" if path.exists() else "does not exist"
        hint = "" if path.exists() else upload_hint(path)
        raise CommandError(f"{path} is not a run's folder: it {problem}. By default, runs are in runs/.{hint}")

    @classmethod
    def _open_in_storage(cls, uri: str) -> "Run":
        if not is_started(uri):
            raise CommandError(
                f"{uri} has no run with a checkpoint to resume from. Correct the URI, or start a new run."
            )
        storage = Storage(uri)
        run = cls._lock_storage(storage)
        is_same = run.read(RUN_ID) == storage.read(RUN_ID)
        local, remote = run.checkpoints.latest_valid() if is_same else -1, max(storage.updates(), default=-1)
        latest = f"{CHECKPOINTS}/{checkpoint_name(local)}/{manifest.NAME}"
        # At equal updates: another machine may have resumed from an earlier checkpoint and repeated the last update.
        if remote < 0 or local > remote or (local == remote and run.read(latest) == storage.read(latest)):
            run.upload()
        else:
            _clear_folder(run.path)
            storage.download(run.path, ["*"])
        return run

    @classmethod
    def _lock_storage(cls, storage: Storage) -> "Run":
        """Locks a run in storage and its local folder."""
        run = cls(storage.cache("runs"), storage)
        make_folder(run.path)
        if storage.folder is not None:
            run._is_new = not storage.folder.exists()
            make_folder(storage.folder)
        run.lock()
        return run

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file in the folder, or None if it does not exist."""
        file = self.path / name
        return file.read_bytes() if file.is_file() else None

    def exists(self) -> bool:
        """Whether a run was started here. Other programs' `config.yaml` does not count."""
        return _is_config(self.read(CONFIG))

    def lock(self) -> None:
        """Locks the run for this process until `unlock` or the end of the process. Does nothing if it is locked.

        Raises:
            CommandError: another process holds the lock.
            LocksUnsupportedError: the file system has no locks.
            StorageError: storage cannot be read or written.
        """
        if self._lock is not None:
            return
        with contextlib.ExitStack() as stack:
            stack.enter_context(lock_folder(self.path))
            if self.storage is not None:
                is_locked = False
                if self.storage.folder is not None:  # another process may train there without a URI
                    with contextlib.suppress(LocksUnsupportedError):
                        stack.enter_context(lock_folder(self.storage.folder))
                        is_locked = True
                self._lease = stack.enter_context(Lease(self.storage, self.path, is_locked))
            self._lock_file = (self.path / LOCK).stat()
            self._lock = stack.pop_all()

    def unlock(self) -> None:
        """Releases the lock and the lease."""
        if self._lock is not None:
            self._lock.close()
            self._lock = self._lock_file = self._lease = None

    def write_settings(self, settings: Settings, origin: str) -> None:
        """Writes `config.yaml`.

        Args:
            settings: of the run.
            origin: the command that starts or resumes the run; added to the comments at the top of the file.
        """
        file = self.path / CONFIG
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        comments = [line for line in lines if line.startswith("# ")] + [f"# {' '.join(origin.splitlines())}"]
        atomic_write(file, "\n".join(comments) + "\n" + settings_to_yaml(settings))

    def settings(self) -> Settings:
        """Reads `config.yaml`. Missing settings have their defaults.

        Raises:
            CommandError: a setting is unknown or invalid, possibly because another version wrote it.
        """
        try:
            return recorded_settings(read_file(self.path / CONFIG))
        except (CommandError, SettingsError) as error:
            raise CommandError(
                f"{self.path} cannot be read as a run: {error} If another version of cory-rllib wrote {CONFIG} (see "
                "its first lines), use that version."
            ) from error

    def updates(self) -> list[Update]:
        """Returns the metrics recorded so far, one entry per update."""
        return cast(list[Update], self.metrics.read())

    def best_update(self) -> int | None:
        """Returns the update with the best held-out score (see `select_by`), the earliest if several are equal."""
        best = best_evaluation(self.updates(), self.settings())
        return best and best[0]

    def cut_after(self, update: int) -> None:
        """Removes records after `update`, from which training resumes, and unfinished checkpoints."""
        self.checkpoints.clean()
        self.metrics.cut_after(update)
        self.samples.cut_after(update)

    def resume_command(self) -> str:
        """Returns the command that resumes this run."""
        return f"cory train --resume {shlex.quote(self.location)}"

    @property
    def location(self) -> str:
        """The run's folder or URI, as accepted by commands."""
        return self.user_path(self.path)

    def user_path(self, path: Path) -> str:
        """Returns a path in the run's folder as shown to users: a URI if the run is in storage."""
        if self.storage is None:
            return str(path)
        return self.storage.uri_of("" if path == self.path else path.relative_to(self.path).as_posix())

    def latest_checkpoint(self) -> int:
        """Returns the update of the latest checkpoint, local or in storage; -1 if there is none.

        Raises:
            StorageError: storage cannot be read.
        """
        remote = [] if self.storage is None else self.storage.updates()
        return max([*self.checkpoints.updates(), *remote], default=-1)

    def download_checkpoint(self) -> None:
        """Downloads the latest valid checkpoint if there is no local one.

        Raises:
            StorageError: storage cannot be read.
        """
        if self.storage is not None and self.checkpoints.empty():
            self.storage.download_checkpoint(self.path)

    def upload(self, best: int | None = None, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Uploads new files if the run is in storage, and removes old checkpoints there (`keep_checkpoints`).

        Args:
            best: update of the best checkpoint, which is kept; None: the best one in the metrics.
            cancelled: whether to stop, asked before each file.

        Raises:
            LeaseLostError: another process has taken the run over.
            StorageError: storage cannot be written.
        """
        if self._lease is not None:
            self._lease.renew()
        if self.storage is not None:
            best = self.best_update() if best is None else best
            self.storage.upload(self.path, self.settings().keep_checkpoints, best, cancelled)

    def sync_error(self) -> str | None:
        """Uploads new files. If that fails, returns a message with the reason, the local folder and a remedy."""
        try:
            self.upload()
        except LeaseLostError as error:
            return str(error)
        except StorageError as error:
            return (
                f"{error} Nothing is lost: the run is in {self.path} on {platform.node()}. When storage is writable "
                f"again, run `{self.resume_command()}` on that machine to upload it."
            )
        return None

    def finalize_upload(self) -> None:
        """Uploads a run in storage completely, then removes its local folder.

        Raises:
            StorageError: storage cannot be written. The local folder is kept.
        """
        if (error := self.sync_error()) is not None:
            raise StorageError(error)
        self.remove_local()

    def remove_local(self) -> None:
        """Removes the local folder of a completely uploaded run, and unlocks both."""
        if self.storage is not None:
            (self.path / RUN_ID).unlink(missing_ok=True)  # so an interrupted removal does not look like the run
            shutil.rmtree(self.path.parent)
            self.unlock()

    def abort(self) -> None:
        """Removes a locked run that failed before its first record, also from storage if this process owns it.

        Does nothing if the folder is gone: another run may have its path, and records are unknown.
        """
        if self.metrics.path.exists() or not self._folder_unchanged():
            return
        if self.storage is None:
            self._remove_started_files()
            if self._is_new and not self._entries():
                shutil.rmtree(self.path)
            self.unlock()
            return
        with contextlib.suppress(StorageError):
            if self._lease is not None:
                self._lease.renew()  # if this fails, another process owns what is in storage
            self.storage.clear()
            if self._is_new and self.storage.folder is not None:
                shutil.rmtree(self.storage.folder)
        self.remove_local()

    def _folder_unchanged(self) -> bool:
        """Whether the locked folder still has its path."""
        file = self.path / LOCK  # held open, so no other file gets its inode
        return self._lock_file is not None and file.exists() and os.path.samestat(self._lock_file, file.stat())

    def _entries(self) -> list[Path]:
        """Returns the folder's entries except locks and unfinished writes."""
        return [path for path in self.path.iterdir() if not path.name.startswith(WRITERS) and path.suffix != ".new"]

    def _remove_started_files(self) -> None:
        """Removes a run that ended before its first checkpoint."""
        _remove(self.path / name for name in STARTED_FILES)


def is_started(location: str) -> bool:
    """Whether a folder or storage has a run with a checkpoint, possibly one that is not uploaded yet.

    Args:
        location: a folder or a URI.

    Raises:
        CommandError: the storage is unknown, or has other files.
        StorageError: storage cannot be read.
    """
    if not is_uri(location):
        run = Run(Path(location))
        return run.exists() and not run.checkpoints.empty()
    storage = Storage(location)
    files = storage.files()
    if files and not _is_config(storage.read(CONFIG)):
        raise CommandError(f"{storage.uri} is not empty and has no run. Empty it, or choose another location.")
    return bool(checkpoint_updates(files)) or not Run(storage.cache("runs")).checkpoints.empty()


def _check_not_started(storage: Storage) -> None:
    if is_started(storage.uri):
        run = Run(storage.cache("runs"), storage)
        raise CommandError(
            f"{storage.uri} already has a run, in storage or in {run.path} on {platform.node()}. Resume it with "
            f"`{run.resume_command()}`, or choose another location with --out."
        )


def _is_config(content: bytes | None) -> bool:
    return content is not None and content.startswith(CONFIG_HEADER.encode())


def _clear_folder(folder: Path) -> None:
    _remove(path for path in folder.iterdir() if not path.name.startswith(WRITERS))


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
