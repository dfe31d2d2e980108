"""A run in storage: trained in a local folder, and mirrored to wherever `pyarrow.fs` can write.

What arrives there is a run's folder as `run_directory` describes it, but for `checkpoints/best`, which is a file that
holds the checkpoint's name, because object stores have no links. A checkpoint's manifest is copied last and removed
first, so one that has its manifest is whole there too.
"""

import contextlib
import hashlib
import io
import os
import platform
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING
from urllib.parse import urlsplit

from launch import manifest
from launch.checkpoints import BEST, name_of, update_of
from launch.command import IN_JOB, CommandError
from launch.run_directory import CONFIG, LOCK, ORIGIN, RunDirectory
from policies.cached_folder import user_cache
from policies.settings import Settings

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

CHECKPOINTS = "checkpoints"
OBJECT_STORES = ("s3", "gcs", "abfs")
"""File systems on which a file appears when it is whole, and which have no folders."""


class StorageError(CommandError):
    """Storage cannot be read or written; the message says where, why, and what to do."""


def is_uri(place: str) -> bool:
    """Tells whether `place` is a URI and no path."""
    return "://" in place


def child(place: str, name: str) -> str:
    """Returns a path or URI below `place`; what stands after a URI's `?` stays at its end."""
    path, mark, query = place.partition("?") if is_uri(place) else (place, "", "")
    return f"{path.rstrip('/')}/{name}{mark}{query}"


def check_place(place: str) -> None:
    """Refuses a place for a run that would be gone, or would show a password, where it is used.

    Raises:
        CommandError: a relative path inside a Ray job; a URI with a password.
    """
    if is_uri(place):
        if urlsplit(place).password:
            raise CommandError(
                f"{urlsplit(place).scheme}://… holds a password, which run folders, logs and job lists would show. "
                "Give credentials by the environment of the nodes, or by a file there."
            )
    elif IN_JOB in os.environ and not Path(place).is_absolute():
        raise CommandError(
            f"The run's folder {place} is relative: in a Ray job it would vanish with the job's working directory. "
            "Give --out an absolute path that all nodes share, or a URI such as s3://bucket/runs/NAME."
        )


class Storage:
    """A run's folder behind a URI. Only one process may write there."""

    def __init__(self, uri: str, filesystem: "tuple[FileSystem, str] | None" = None) -> None:
        """Names the place; nothing is read yet.

        Args:
            uri: that `pyarrow.fs.FileSystem.from_uri` understands.
            filesystem: and a path in it; default: what the URI says.

        Raises:
            CommandError: the URI is of no file system that is known here.
        """
        import pyarrow
        from pyarrow.fs import FileSystem

        path, mark, query = uri.partition("?")
        self.uri = f"{path.rstrip('/')}{mark}{query}"
        try:
            self._files, base = filesystem or FileSystem.from_uri(uri)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError) as error:
            raise CommandError(f"{uri} is no place for a run: {_reason(error)}. Use s3://, gs://, file:///") from error
        except OSError as error:
            raise self._unreachable("reached", error) from error
        self._base = base.rstrip("/")
        self._sent: dict[str, tuple[int, int]] = {}  # name: (size, time of change) of what was copied
        self._damaged: set[int] = set()  # updates whose checkpoints there are not what they were

    def names(self) -> list[str]:
        """Returns all files of the run there, as paths relative to it.

        Raises:
            StorageError: storage cannot be read.
        """
        from pyarrow.fs import FileSelector, FileType

        try:
            found = self._files.get_file_info(FileSelector(self._base, recursive=True, allow_not_found=True))
        except OSError as error:
            raise self._unreachable("read", error) from error
        return [file.path.removeprefix(self._base).lstrip("/") for file in found if file.type == FileType.File]

    def updates(self, names: Iterable[str]) -> list[int]:
        """Returns the updates of the whole checkpoints among `names`, in order."""
        paths = [PurePosixPath(name).parts for name in names]
        sealed = [path[1] for path in paths if len(path) == 3 and path[0] == CHECKPOINTS and path[2] == manifest.NAME]
        return sorted(update for update in map(update_of, sealed) if update is not None)

    def holds_run(self, names: Iterable[str]) -> bool:
        """Tells whether a run was started there, given all files.

        Raises:
            StorageError: storage cannot be read.
        """
        return CONFIG in names and self.read(CONFIG).startswith(ORIGIN.encode())

    def read(self, name: str) -> bytes:
        """Returns a file's content.

        Raises:
            StorageError: it cannot be read.
        """
        try:
            with self._files.open_input_stream(self._at(name)) as file:
                return file.read()
        except OSError as error:
            raise self._unreachable("read", error) from error

    def below(self, name: str) -> str:
        """Returns the URI of a file there."""
        return child(self.uri, name)

    def fetch(self, folder: Path) -> None:
        """Copies what a run needs to go on: its own files, and the latest checkpoint that is whole.

        Later checkpoints that are damaged are copied too, to be reported.

        Args:
            folder: local, made if it does not exist; files of the same name are replaced.

        Raises:
            StorageError: storage cannot be read.
        """
        names = self.names()
        for name in names:
            if "/" not in name and not name.startswith("."):
                self._get(name, folder / name)
        for update in reversed(self.updates(names)):
            place = f"{CHECKPOINTS}/{name_of(update)}"
            for name in names:
                if name.startswith(f"{place}/"):
                    self._get(name, folder / name)
            if manifest.fault(folder / place) is None:
                return
            self._damaged.add(update)

    def push(self, folder: Path, keep: int, best: int | None) -> None:
        """Copies what is new in a run's folder, and removes the checkpoints that are no longer kept.

        Args:
            folder: local; only one process may write to it and to this storage.
            keep: the number of latest checkpoints that stay.
            best: the update whose checkpoint stays too.

        Raises:
            StorageError: storage cannot be written; what is there still is a whole, older state of the run.
        """
        there = self.names()
        saved = set(self.updates(there)) - self._damaged
        here = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
        updates = sorted(saved.union(self.updates(here)))
        kept = {*updates[-keep:], *([best] if best in updates else [])}
        wanted = set(map(name_of, kept - saved))
        # Metrics before seals, as on the disk: a checkpoint never lacks its lines.
        for name in sorted(here, key=lambda name: self.updates([name]) != []):
            parts = PurePosixPath(name).parts
            if parts[1] in wanted if parts[0] == CHECKPOINTS else not any(part.startswith(".") for part in parts):
                self._put(folder / name, name)
        if best in kept:
            self._store(f"{CHECKPOINTS}/{BEST}", io.BytesIO(f"{name_of(best)}\n".encode()))
        present = {name.split("/")[1] for name in there if name.startswith(f"{CHECKPOINTS}/")}
        for checkpoint in present - {BEST, *map(name_of, kept)}:
            self._remove(f"{CHECKPOINTS}/{checkpoint}", there)
        self._damaged.clear()

    def clear(self) -> None:
        """Removes all that is there.

        Raises:
            StorageError: storage cannot be written.
        """
        try:
            self._files.delete_dir_contents(self._base, missing_dir_ok=True)
        except OSError as error:
            raise self._unreachable("written", error) from error

    def _at(self, name: str) -> str:
        return f"{self._base}/{name}"

    def _get(self, name: str, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._files.open_input_stream(self._at(name)) as source, file.open("wb") as target:
                shutil.copyfileobj(source, target, 2**24)
        except OSError as error:
            raise self._unreachable(f"copied to {file}", error) from error

    def _put(self, file: Path, name: str) -> None:
        try:
            source = file.open("rb")
        except FileNotFoundError:  # another library's, removed meanwhile
            return
        with source:
            stat = os.fstat(source.fileno())
            state = (stat.st_size, stat.st_mtime_ns)
            if self._sent.get(name) != state:
                self._store(name, source)
                self._sent[name] = state

    def _store(self, name: str, source: IO[bytes]) -> None:
        """Writes a file; a reader or a kill finds the old one or the new one."""
        direct = self._files.type_name in OBJECT_STORES
        target = self._at(name) if direct else f"{self._at(name)}.part"
        try:
            if not direct:
                self._files.create_dir(str(PurePosixPath(target).parent), recursive=True)
            with self._files.open_output_stream(target) as stream:
                shutil.copyfileobj(source, stream, 2**24)
            if not direct:
                self._files.move(target, self._at(name))
        except OSError as error:
            with contextlib.suppress(OSError):
                self._files.delete_file(f"{self._at(name)}.part")
            raise self._unreachable("written", error) from error

    def _remove(self, checkpoint: str, there: Iterable[str]) -> None:
        """Removes a checkpoint, its seal first."""
        try:
            if f"{checkpoint}/{manifest.NAME}" in there:
                self._files.delete_file(self._at(f"{checkpoint}/{manifest.NAME}"))
            self._files.delete_dir(self._at(checkpoint))
        except OSError as error:
            raise self._unreachable("written", error) from error
        self._sent = {name: state for name, state in self._sent.items() if not name.startswith(f"{checkpoint}/")}

    def _unreachable(self, what: str, error: Exception) -> StorageError:
        return StorageError(f"{self.uri} cannot be {what}: {_reason(error)}.")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def create_run(uri: str) -> RunDirectory:
    """Takes a local folder for a new run that is mirrored to `uri`.

    Raises:
        CommandError: something is there already; another process trains it on this machine.
        StorageError: storage cannot be read or written.
    """
    storage = Storage(uri)
    run = _local(storage)
    names = storage.names()
    if names and not storage.holds_run(names):
        raise CommandError(f"{storage.uri} is not empty: empty it, or name another place with --out.")
    if storage.updates(names):
        raise CommandError(
            f"{storage.uri} holds a run: go on with it by `{run.resume_command()}`, or name another place with --out."
        )
    storage.clear()  # a run that ended before anything of it was saved
    _empty(run.path)
    return run


def open_run(uri: str) -> RunDirectory:
    """Fetches a run into a local folder, which this process then has.

    Where this machine has more of the run, which never arrived in storage, that is copied there instead.

    Raises:
        CommandError: there is no run; another process trains it on this machine.
        StorageError: storage cannot be read or written.
    """
    storage = Storage(uri)
    names = storage.names()
    if not storage.holds_run(names):
        raise CommandError(f"{storage.uri} is not a run's folder: it has no run's {CONFIG}.")
    run = _local(storage)
    if _is_ahead(run, storage, names):
        run.mirror(run.settings().keep_checkpoints)
    else:
        _empty(run.path)
        storage.fetch(run.path)
    return run


def _is_ahead(run: RunDirectory, storage: Storage, names: Sequence[str]) -> bool:
    """Tells whether the local folder has a later checkpoint of the very run that storage has."""
    here = [update for update in run.checkpoints.updates() if not manifest.fault(run.checkpoints.place(update))]
    if not run.exists() or max(here, default=-1) <= max(storage.updates(names), default=-1):
        return False
    metrics = run.metrics.path
    there = storage.read(metrics.name) if metrics.name in names else b""
    return metrics.read_bytes().startswith(there)  # its lines hold times, which no other run shares


def hand_over(run: RunDirectory, settings: Settings) -> None:
    """Ends the mirroring of a run: storage has everything, and the local folder goes.

    Raises:
        StorageError: storage cannot be written; the local folder stays.
    """
    if run.storage is not None:
        try:
            run.mirror(settings.keep_checkpoints)
        except StorageError as error:
            raise StorageError(f"{error} {stranded(run)}") from error
        shutil.rmtree(run.path.parent)


def stranded(run: RunDirectory) -> str:
    """Returns where everything is that storage lacks, and how it gets there."""
    return (
        f"Nothing is lost: the run is in {run.path} on {platform.node()}. When storage can be written again, "
        f"`{run.resume_command()}` on that machine copies it."
    )


def _local(storage: Storage) -> RunDirectory:
    """Takes the local folder of what is mirrored to `storage`."""
    place = user_cache() / "runs" / hashlib.sha256(storage.uri.encode()).hexdigest()[:12]
    run = RunDirectory(place / PurePosixPath(storage.uri.partition("?")[0]).name)
    try:
        run.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"{run.path}, where the run is to work, cannot be made: {error.strerror}.") from error
    run.storage = storage
    run.lock()
    return run


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != LOCK:
            entry.unlink()
