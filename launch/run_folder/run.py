"""A run, in a folder or in storage: who may write to it, what it holds, and how it is continued.

A run in storage works in a folder of the user's cache, from which `upload` copies what is new.
"""

import contextlib
import os
import platform
import secrets
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import cast

from launch.console.configuration import as_yaml, read_file
from launch.console.errors import CommandError, make_folder
from launch.run_folder import manifest
from launch.run_folder.checkpoints import Checkpoints, name_of
from launch.run_folder.journal import Journal, atomic_write
from launch.run_folder.layout import (
    BEGUN,
    CHECKPOINTS,
    CONFIG,
    CURVES,
    FINAL,
    LOCK,
    LOG,
    METRICS,
    ORIGIN,
    RUN_ID,
    SAMPLES,
    WRITERS,
    new_folder,
)
from launch.run_folder.lease import Lease, LeaseLostError
from launch.run_folder.locks import NoLocks, lock_folder
from launch.run_folder.records import Update, best_of
from launch.run_folder.storage import Storage, StorageError, is_uri, updates_in
from policies.settings.settings import Settings, SettingsError, make_settings


class Run:
    """One run. Reading needs no lock; `lock` must be held to write."""

    def __init__(self, path: Path, storage: Storage | None = None) -> None:
        """Names a run's folder, which may not exist yet, and the storage that it is uploaded to, or was copied from."""
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
        self._is_new = False  # its folder was made for it, and goes if it is refused

    @classmethod
    def create(cls, place: str | Path | None, name: str = "") -> "Run":
        """Makes a new run's folder and locks it.

        Args:
            place: a folder or a URI; None: a fresh folder under `runs/`.
            name: of such a folder.

        Raises:
            CommandError: something is there already, or the folder cannot be made; another process trains there.
            StorageError: storage cannot be read or written.
        """
        if place is not None and is_uri(str(place)):
            return cls._create_in_storage(str(place))
        run = cls(new_folder(name) if place is None else Path(place))
        run._is_new = place is None or not run.path.exists()
        make_folder(run.path)
        if not run.exists() and run._entries():
            raise CommandError(f"{run.path} is not empty: empty it, or name another folder with --out.")
        run.lock()
        if run.exists() and run.checkpoints.empty():
            run._clear()
        if run._entries():
            run.unlock()
            raise CommandError(
                f"{run.path} holds a run: go on with it by `{run.resume_command()}`, or name another folder with --out."
            )
        return run

    @classmethod
    def _create_in_storage(cls, uri: str) -> "Run":
        storage = Storage(uri)
        _refuse_begun(storage)  # before anything is touched
        run = cls._work_on(storage)
        try:
            _refuse_begun(storage)  # another process may have begun one, and ended, since
        except CommandError:
            run.unlock()
            raise
        storage.clear()  # a run that ended before anything of it was saved
        _empty(run.path)
        (run.path / RUN_ID).write_text(secrets.token_hex(8))
        return run

    @classmethod
    def open(cls, place: str | Path) -> "Run":
        """Returns an existing run, to continue it: a folder, not locked yet; or a run in storage, locked.

        Of that it downloads all but the checkpoint (`download_checkpoint`), unless this machine has all of the run and
        maybe more, which never arrived in storage: then it uploads that.

        Raises:
            CommandError: there is no run, or in storage none with a checkpoint; another process trains that.
            StorageError: storage cannot be read or written.
        """
        if is_uri(str(place)):
            return cls._open_in_storage(str(place))
        run, path = cls(Path(place)), Path(place)
        if run.exists():
            return run
        missing = f"has no run's {CONFIG}" if path.is_dir() else "is a file" if path.exists() else "does not exist"
        raise CommandError(f"{path} is not a run's folder: it {missing}. Runs lie under runs/ unless --out said else.")

    @classmethod
    def _open_in_storage(cls, uri: str) -> "Run":
        if not is_begun(uri):
            raise CommandError(f"{uri} has no run with a checkpoint to go on from. Correct it, or start a new run.")
        storage = Storage(uri)
        run = cls._work_on(storage)
        is_same = run.read(RUN_ID) == storage.read(RUN_ID)
        local, remote = run.checkpoints.latest_valid() if is_same else -1, max(storage.updates(), default=-1)
        latest = f"{CHECKPOINTS}/{name_of(local)}/{manifest.NAME}"
        # At equal updates: another machine may have been set back, and have done the last one anew.
        if remote < 0 or local > remote or (local == remote and run.read(latest) == storage.read(latest)):
            run.upload()
        else:
            _empty(run.path)
            storage.download(run.path, ["*"])
        return run

    @classmethod
    def _work_on(cls, storage: Storage) -> "Run":
        """Locks a run in storage, and the local folder in which it works."""
        run = cls(storage.cache("runs"), storage)
        make_folder(run.path)
        if storage.folder is not None:
            run._is_new = not storage.folder.exists()
            make_folder(storage.folder)
        run.lock()
        return run

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file of the folder, or None if there is none of that name."""
        file = self.path / name
        return file.read_bytes() if file.is_file() else None

    def exists(self) -> bool:
        """Tells whether a run was started here: other programs have a file of that name too."""
        return _is_config(self.read(CONFIG))

    def lock(self) -> None:
        """Takes the run for this process, until it ends, unless it has it already.

        Raises:
            CommandError: another process has it.
            NoLocks: its file system has no locks.
            StorageError: storage cannot be read or written.
        """
        if self._lock is not None:
            return
        with contextlib.ExitStack() as stack:
            stack.enter_context(lock_folder(self.path))
            if self.storage is not None:
                is_locked = False
                if self.storage.folder is not None:  # another process may train there without a URI
                    with contextlib.suppress(NoLocks):
                        stack.enter_context(lock_folder(self.storage.folder))
                        is_locked = True
                self._lease = stack.enter_context(Lease(self.storage, self.path, is_locked))
            self._lock_file = (self.path / LOCK).stat()
            self._lock = stack.pop_all()

    def unlock(self) -> None:
        """Lets other processes write here again."""
        if self._lock is not None:
            self._lock.close()
            self._lock = self._lock_file = self._lease = None

    def write_settings(self, settings: Settings, origin: str) -> None:
        """Writes `config.yaml`; its first lines are the commands that made it, `origin` the latest."""
        file = self.path / CONFIG
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        comments = [line for line in lines if line.startswith("# ")] + [f"# {' '.join(origin.splitlines())}"]
        atomic_write(file, "\n".join(comments) + "\n" + as_yaml(settings))

    def settings(self) -> Settings:
        """Reads `config.yaml`; a setting that it lacks has its default.

        Raises:
            CommandError: it holds something that is no setting, or no setting any more.
        """
        try:
            return make_settings(read_file(self.path / CONFIG))
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

    def cut_after(self, update: int) -> None:
        """Removes what was recorded after `update`, from which training continues, and what was left unfinished."""
        self.checkpoints.clean()
        self.metrics.cut_after(update)
        self.samples.cut_after(update)

    def resume_command(self) -> str:
        """Returns the command that continues this run."""
        return f"cory train --resume {shlex.quote(self.place)}"

    @property
    def place(self) -> str:
        """The run's folder or URI, as commands take it."""
        return self.shown(self.path)

    def shown(self, path: Path) -> str:
        """Returns how a user finds a path of this folder: by its URI, if the run is in storage."""
        if self.storage is None:
            return str(path)
        return self.storage.uri_of("" if path == self.path else path.relative_to(self.path).as_posix())

    def latest_checkpoint(self) -> int:
        """Returns the update of the latest checkpoint, here or in storage; -1 if there is none.

        Raises:
            StorageError: storage cannot be read.
        """
        remote = [] if self.storage is None else self.storage.updates()
        return max([*self.checkpoints.updates(), *remote], default=-1)

    def download_checkpoint(self) -> None:
        """Downloads the latest whole checkpoint, if the run has one in storage and none here.

        Raises:
            StorageError: storage cannot be read.
        """
        if self.storage is not None and self.checkpoints.empty():
            self.storage.download_checkpoint(self.path)

    def upload(self) -> None:
        """Uploads what is new, if the run is in storage, which keeps as many checkpoints as the settings say.

        Raises:
            Lost: another process writes there now.
            StorageError: storage cannot be written.
        """
        if self._lease is not None:
            self._lease.renew()
        if self.storage is not None:
            self.storage.upload(self.path, self.settings().keep_checkpoints, self.best_update())

    def sync_error(self) -> str | None:
        """Uploads what is new; if that fails, returns why, where everything is, and how it gets to storage."""
        try:
            self.upload()
        except LeaseLostError as error:
            return str(error)
        except StorageError as error:
            return (
                f"{error} Nothing is lost: the run is in {self.path} on {platform.node()}. When storage can be written "
                f"again, `{self.resume_command()}` on that machine copies it."
            )
        return None

    def finalize_upload(self) -> None:
        """Uploads all of a run in storage, and removes the local folder.

        Raises:
            StorageError: storage cannot be written; the local folder stays.
        """
        if (error := self.sync_error()) is not None:
            raise StorageError(error)
        self.remove_local()

    def remove_local(self) -> None:
        """Removes the local folder of a run that storage has all of, and unlocks both."""
        if self.storage is not None:
            (self.path / RUN_ID).unlink(missing_ok=True)  # what an interrupt leaves is then not taken for the run
            shutil.rmtree(self.path.parent)
            self.unlock()

    def abort(self) -> None:
        """Removes a locked run that was refused before anything of it was recorded, also from storage if it owns that.

        Not if its folder is gone: what was recorded is then not known, and another run may have its path.
        """
        if self.metrics.path.exists() or not self._is_in_place():
            return
        if self.storage is None:
            self._clear()
            if self._is_new and not self._entries():
                shutil.rmtree(self.path)
            self.unlock()
            return
        with contextlib.suppress(StorageError):
            if self._lease is not None:
                self._lease.renew()  # else what is there is the run of who took it over
            self.storage.clear()
            if self._is_new and self.storage.folder is not None:
                shutil.rmtree(self.storage.folder)
        self.remove_local()

    def _is_in_place(self) -> bool:
        """Tells whether the folder that was locked still has its path."""
        file = self.path / LOCK  # held open, so no other file gets its number
        return self._lock_file is not None and file.exists() and os.path.samestat(self._lock_file, file.stat())

    def _entries(self) -> list[Path]:
        """Returns what lies in the folder, but for what says who may write there, and what a kill left unfinished."""
        return [path for path in self.path.iterdir() if not path.name.startswith(WRITERS) and path.suffix != ".new"]

    def _clear(self) -> None:
        """Removes a run that ended before anything of it was saved."""
        _remove(self.path / name for name in BEGUN)


def is_begun(place: str) -> bool:
    """Tells whether something of a run is saved in a folder or in storage, or has yet to be uploaded there from here.

    Raises:
        CommandError: there is no such storage, or something else in it.
        StorageError: storage cannot be read.
    """
    if not is_uri(place):
        run = Run(Path(place))
        return run.exists() and not run.checkpoints.empty()
    storage = Storage(place)
    files = storage.files()
    if files and not _is_config(storage.read(CONFIG)):
        raise CommandError(f"{storage.uri} is not empty and holds no run: empty it, or name another place.")
    return bool(updates_in(files)) or not Run(storage.cache("runs")).checkpoints.empty()


def _refuse_begun(storage: Storage) -> None:
    if is_begun(storage.uri):
        run = Run(storage.cache("runs"), storage)
        raise CommandError(
            f"{storage.uri} has a run, there or in {run.path} on {platform.node()}: go on with it by "
            f"`{run.resume_command()}`, or name another place with --out."
        )


def _is_config(content: bytes | None) -> bool:
    return content is not None and content.startswith(ORIGIN.encode())


def _empty(folder: Path) -> None:
    _remove(path for path in folder.iterdir() if not path.name.startswith(WRITERS))


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
