"""A run's folder in a bucket, or wherever else `pyarrow.fs` can write: what is uploaded there, and downloaded.

What arrives there is a run's folder as `launch.run_folder.run` describes it, but for `checkpoints/best`, which is a
file that holds the checkpoint's name, because object stores have no links. A checkpoint's manifest is uploaded last and
removed first: a folder without one is no checkpoint.
"""

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from launch.console.credentials import secret_in
from launch.console.errors import IN_JOB, CommandError
from launch.run_folder import manifest
from launch.run_folder.checkpoints import BEST, name_of, update_of
from launch.run_folder.layout import CHECKPOINTS, CONFIG, FINAL, LEASE, METRICS, SAMPLES, SOURCES, WRITERS
from policies.models.cache import user_cache

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo, FileSystem

CACHED_FILES = (CONFIG, SOURCES, METRICS, f"{CHECKPOINTS}/{BEST}")
"""What is read of a run, beside a checkpoint."""
REFUSED_FILES = "refused_update_*"
REPORTED = (*CACHED_FILES, SAMPLES, FINAL, REFUSED_FILES)
"""What a report reads of a run."""
OBJECT_STORES = ("s3", "gcs", "abfs")
"""File systems on which a file appears when it is whole, and which have no folders."""
PART = ".part"
"""How the names of files end that are not whole yet, or never will be: a kill leaves them."""
CHUNK = 2**24
"""Bytes that are copied at once."""


class StorageError(CommandError):
    """Storage cannot be read or written; the message says where, why, and what to do."""


def is_uri(place: str) -> bool:
    """Tells whether `place` is a URI and no path."""
    return "://" in place


def child(place: str, name: str) -> str:
    """Returns a path or URI below `place`; what stands after a URI's `?` stays at its end."""
    path, mark, query = place.partition("?") if is_uri(place) else (place, "", "")
    return f"{path.rstrip('/')}/{name}{mark}{query}"


def check_location(place: str, what: str = "run") -> None:
    """Refuses a place for a run, or for `what` else, that would be gone, or would show a password, where it is used.

    Raises:
        CommandError: a relative path inside a Ray job; a URI with a password or another secret, or for what is no run.
    """
    if is_uri(place):
        if what != "run":
            raise CommandError(f"{place} is a URI, but the {what} is written to a folder here. Name a path.")
        if (secret := secret_in(place)) is not None:
            raise CommandError(
                f"{secret}, which run folders, logs and job lists would show. Give credentials by the environment of "
                "the nodes, or by a file there."
            )
    elif IN_JOB in os.environ and not Path(place).is_absolute():
        uri = ", or a URI such as s3://bucket/runs/NAME" if what == "run" else ""
        raise CommandError(
            f"The {what}'s folder {place} is relative: in a Ray job it would vanish with the job's working directory. "
            f"Give --out an absolute path that all nodes share{uri}."
        )


class Storage:
    """A run's folder behind a URI. Only one process may write there, which has its lock or `Lease`."""

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
            with self._reported("reached"):
                self._files, base = filesystem or FileSystem.from_uri(uri)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError) as error:
            raise CommandError(f"{uri} is no place for a run: {_reason(error)}. Use s3://, gs://, file:///") from error
        self._base = base.rstrip("/")
        self._uploaded: dict[str, tuple[int, int]] = {}  # by name, (size, time of change) of what was uploaded
        self._damaged: set[int] = set()  # updates whose checkpoints there are damaged

    @property
    def folder(self) -> Path | None:
        """Where it lies if that is on a disk of this machine, or one that is mounted."""
        return Path(self._base) if self._files.type_name == "local" else None

    def uri_of(self, name: str) -> str:
        """Returns the URI of a file there; of the run, if it is empty."""
        return child(self.uri, name) if name else self.uri

    def cache(self, kind: str) -> Path:
        """Returns the folder of the user's cache for a copy of this run.

        Args:
            kind: `runs` of those that work there, `looked-at` of those that are read.
        """
        name = PurePosixPath(self.uri.partition("?")[0]).name
        return user_cache() / kind / hashlib.sha256(self.uri.encode()).hexdigest()[:12] / name

    def files(self) -> "dict[str, FileInfo]":
        """Returns all files of the run there, by their paths relative to it.

        Raises:
            StorageError: storage cannot be read.
        """
        from pyarrow.fs import FileSelector, FileType

        with self._reported("read"):
            entries = self._files.get_file_info(FileSelector(self._base, recursive=True, allow_not_found=True))
        files = {file.path.removeprefix(self._base).lstrip("/"): file for file in entries if file.type == FileType.File}
        return {name: file for name, file in files.items() if _is_of_run(name)}

    def updates(self) -> list[int]:
        """Returns the updates of the checkpoints there, in order.

        Raises:
            StorageError: storage cannot be read.
        """
        return updates_in(self.files())

    def read(self, name: str) -> bytes | None:
        """Returns a file's content, or None if there is no such file.

        Raises:
            StorageError: storage cannot be read.
        """
        from pyarrow.fs import FileType

        with self._reported("read"):
            if self._files.get_file_info(self._at(name)).type != FileType.File:
                return None
            with self._files.open_input_stream(self._at(name)) as file:
                return file.read()

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file atomically: a reader, or a kill, finds the old content or the new.

        Raises:
            StorageError: storage cannot be written.
        """

        def put(path: str) -> None:
            with self._files.open_output_stream(path) as file:
                file.write(content)

        # A thread gets no Ctrl-C, after which an object store would publish an empty object.
        with self._appearing(name) as path, ThreadPoolExecutor(1) as thread:
            thread.submit(put, path).result()

    def remove(self, name: str) -> None:
        """Removes a file.

        Raises:
            StorageError: it is not there, or storage cannot be written.
        """
        with self._reported("written"):
            self._files.delete_file(self._at(name))

    def clear(self) -> None:
        """Removes all of the run that is there.

        Raises:
            StorageError: storage cannot be written.
        """
        from pyarrow.fs import FileSelector, FileType

        with self._reported("written"):
            for entry in self._files.get_file_info(FileSelector(self._base, allow_not_found=True)):
                if entry.type == FileType.Directory:
                    self._files.delete_dir(entry.path)
                elif not entry.base_name.startswith(WRITERS):
                    self._files.delete_file(entry.path)
        self._uploaded.clear()

    def upload(self, folder: Path, keep: int, best: int | None) -> None:
        """Uploads what is new in a run's folder, and removes the checkpoints that are no longer kept.

        Args:
            folder: local; only one process may write to it and to this storage.
            keep: the number of latest checkpoints that stay.
            best: the update whose checkpoint stays too.

        Raises:
            StorageError: storage cannot be written; what is there still is a whole, older state of the run.
        """
        for update in sorted(self._damaged):  # now that training goes on from an earlier one
            self.remove(f"{CHECKPOINTS}/{name_of(update)}/{manifest.NAME}")
            self._damaged.remove(update)
        remote = self.files()
        paths = sorted(Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
        local = {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}
        saved = {*updates_in(remote)}
        updates = sorted(saved.union(updates_in(local)))
        kept = {*updates[-keep:], *([best] if best in updates else [])}
        missing = {*map(name_of, kept - saved)}
        # Metrics before manifests, as on the disk: a checkpoint never lacks its lines.
        for name in sorted(local, key=lambda name: PurePosixPath(name).name == manifest.NAME):
            parts = PurePosixPath(name).parts
            is_hidden = any(part.startswith(".") for part in parts)
            if parts[1] in missing if parts[0] == CHECKPOINTS else not is_hidden:
                self._upload(local[name], name)
        if best in kept:
            self.write(f"{CHECKPOINTS}/{BEST}", f"{name_of(best)}\n".encode())
        for checkpoint in self._checkpoints().difference(map(name_of, kept)):
            if f"{CHECKPOINTS}/{checkpoint}/{manifest.NAME}" in remote:
                self.remove(f"{CHECKPOINTS}/{checkpoint}/{manifest.NAME}")
            with self._reported("written"):
                self._files.delete_dir(self._at(f"{CHECKPOINTS}/{checkpoint}"))

    def download(self, folder: Path, patterns: Sequence[str], files: "Mapping[str, FileInfo] | None" = None) -> None:
        """Makes the files of a folder what storage has: downloads those that differ, removes those that it lacks.

        Args:
            folder: local; only one process may do this at a time, others may read meanwhile.
            patterns: of the files: `*` stands for no `/`, and `**` at the end for anything.
            files: all that are there, as `files` returns them; None: they are listed.

        Raises:
            StorageError: storage cannot be read.
        """
        remote = {name: file for name, file in (files or self.files()).items() if _matches(name, patterns)}
        for path in list(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            is_own = not name.startswith(WRITERS)
            if name not in remote and is_own and _matches(name, patterns) and path.is_file():
                path.unlink()
        for name, file in remote.items():
            path = folder / name
            if not (path.exists() and _state(path) == (file.size, file.mtime_ns)):
                self._download(name, path, file.mtime_ns)

    def download_checkpoint(self, folder: Path) -> None:
        """Downloads the latest checkpoint that is whole, and later ones, which are damaged, to be reported.

        Args:
            folder: the run's, local.

        Raises:
            StorageError: storage cannot be read.
        """
        for update in reversed(self.updates()):
            checkpoint = f"{CHECKPOINTS}/{name_of(update)}"
            self.download(folder, [f"{checkpoint}/**"])
            if manifest.verify(folder / checkpoint) is None:
                return
            self._damaged.add(update)

    def _at(self, name: str) -> str:
        return f"{self._base}/{name}"

    def _checkpoints(self) -> set[str]:
        """Returns the names of the folders of checkpoints, also of those in which a kill left nothing that is whole."""
        from pyarrow.fs import FileSelector, FileType

        with self._reported("read"):
            entries = self._files.get_file_info(FileSelector(self._at(CHECKPOINTS), allow_not_found=True))
        names = {entry.base_name for entry in entries if entry.type == FileType.Directory}
        return {name for name in names if update_of(name) is not None}

    def _upload(self, file: Path, name: str) -> None:
        """Uploads a file atomically, if it has changed. No signal interrupts Arrow, which would end an object early."""
        from pyarrow.fs import LocalFileSystem, copy_files

        try:
            state = _state(file)
            if self._uploaded.get(name) != state:
                with self._appearing(name) as path:
                    copy_files(str(file), path, LocalFileSystem(), self._files, chunk_size=CHUNK)
                self._uploaded[name] = state
        except (FileNotFoundError, StorageError):
            if file.exists():  # else its library has removed it meanwhile
                raise

    @contextlib.contextmanager
    def _appearing(self, name: str) -> Iterator[str]:
        """Yields the path to write a file to, which appears under its name when this is left."""
        path = self._at(name)
        with self._reported("written"):
            if self._files.type_name in OBJECT_STORES:
                yield path
                return
            own = f".{secrets.token_hex(4)}" if name == LEASE else ""  # which several may write at once
            part = f"{path}{own}{PART}"
            self._files.create_dir(str(PurePosixPath(path).parent), recursive=True)
            try:
                yield part
                self._files.move(part, path)
            except OSError:
                with contextlib.suppress(OSError):
                    self._files.delete_file(part)
                raise

    def _download(self, name: str, file: Path, time: int | None) -> None:
        """Copies a file here atomically, with its time of change there, in nanoseconds since 1970, if that is known."""
        from pyarrow.fs import LocalFileSystem, copy_files

        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_name(f".{file.name}{PART}")
        try:
            with self._reported(f"copied to {file}"):
                copy_files(self._at(name), str(beside), self._files, LocalFileSystem(), chunk_size=CHUNK)
                if time is not None:
                    os.utime(beside, ns=(time, time))
                beside.replace(file)
        finally:
            beside.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"{self.uri} cannot be {what}: {_reason(error)}.") from error


def updates_in(names: Iterable[str]) -> list[int]:
    """Returns the updates of the checkpoints of which there is a manifest among `names`, in order."""
    paths = [PurePosixPath(name).parts for name in names]
    whole = [path[1] for path in paths if len(path) == 3 and path[0] == CHECKPOINTS and path[2] == manifest.NAME]
    return sorted(update for update in map(update_of, whole) if update is not None)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(
        name.startswith(pattern[:-2]) if pattern.endswith("**") else PurePosixPath("/", name).match(f"/{pattern}")
        for pattern in patterns
    )


def _is_of_run(name: str) -> bool:
    """Tells whether a file may be a run's.

    Not so one that says who may write, one that is not whole, and one with `..`, as a bucket may hold.
    """
    is_own = not name.startswith(WRITERS) and not name.endswith(PART)
    return is_own and not {"", ".", ".."}.intersection(name.split("/"))


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _state(file: Path) -> tuple[int, int]:
    """Returns the size of a file, and when it changed, in nanoseconds since 1970."""
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns
