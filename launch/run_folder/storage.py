"""A run in remote storage: a bucket, or any other file system of `pyarrow.fs`.

The layout is that of a run's folder (`launch.run_folder.layout`), except that `checkpoints/best` is a file with the
checkpoint's name, because object stores have no links. A checkpoint's manifest is uploaded last and removed first: a
folder without a manifest is not a checkpoint.
"""

import contextlib
import hashlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from cory_env.home import IN_JOB
from launch.console.credentials import find_secret
from launch.console.errors import CommandError
from launch.run_folder import manifest
from launch.run_folder.checkpoints import BEST, checkpoint_name, parse_update
from launch.run_folder.layout import CHECKPOINTS, CONFIG, FINAL, LEASE, METRICS, SAMPLES, SOURCES, WRITERS
from policies.models.cache import user_cache

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo, FileSystem

CACHED_FILES = (CONFIG, SOURCES, METRICS, f"{CHECKPOINTS}/{BEST}")
"""Files of a run that readers need, besides a checkpoint."""
REJECTED_FILES = "refused_update_*"
RECORD_FILES = (*CACHED_FILES, SAMPLES, FINAL, REJECTED_FILES)
"""All files of a run that Python programs read, besides checkpoints."""
OBJECT_STORES = ("s3", "gcs", "abfs")
"""File systems that publish a file only when it is complete, and have no folders."""
PART_SUFFIX = ".part"
"""Suffix of incomplete files: still being written, or left by a killed process."""
COPY_CHUNK_BYTES = 2**24
"""Bytes copied at once."""


class StorageError(CommandError):
    """Storage cannot be read or written. The message has the URI, the reason and a remedy."""


def is_uri(location: str) -> bool:
    """Whether a location is a URI rather than a path."""
    return "://" in location


def join_location(parent: str, name: str) -> str:
    """Returns the path or URI of `name` below `parent`. A URI's query (after `?`) stays at the end."""
    path, mark, query = parent.partition("?") if is_uri(parent) else (parent, "", "")
    return f"{path.rstrip('/')}/{name}{mark}{query}"


def check_location(location: str, kind: str = "run") -> None:
    """Rejects a location that would be lost after a Ray job, or that contains a secret.

    Args:
        location: a folder or a URI.
        kind: of the output, for messages. Only a `run` may have a URI.

    Raises:
        CommandError: a relative path inside a Ray job; a URI with a secret; a URI for another kind of output.
    """
    if is_uri(location):
        if kind != "run":
            raise CommandError(f"{location} is a URI, but the {kind} requires a local folder. Use a path.")
        if (secret := find_secret(location)) is not None:
            raise CommandError(
                f"{secret}, which run folders, logs and job lists would show. Set credentials in the environment of "
                "the nodes."
            )
    elif IN_JOB in os.environ and not Path(location).is_absolute():
        uri = ", or a URI such as s3://bucket/runs/NAME" if kind == "run" else ""
        raise CommandError(
            f"The {kind}'s folder {location} is relative, and a Ray job's working directory is removed when the job "
            f"ends. Use an absolute path that all nodes share, such as --out /shared/{kind}{uri}."
        )


class Storage:
    """A run's files at a URI. Only the process that holds the run's lock or `Lease` may write there."""

    def __init__(self, uri: str, filesystem: "tuple[FileSystem, str] | None" = None) -> None:
        """Resolves the URI without reading anything.

        Args:
            uri: as accepted by `pyarrow.fs.FileSystem.from_uri`.
            filesystem: a file system and a path in it; None: those of the URI.

        Raises:
            CommandError: the URI's file system is unknown.
        """
        import pyarrow
        from pyarrow.fs import FileSystem

        path, mark, query = uri.partition("?")
        self.uri = f"{path.rstrip('/')}{mark}{query}"
        try:
            with self._storage_errors("reached"):
                self._filesystem, base = filesystem or FileSystem.from_uri(uri)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError) as error:
            raise CommandError(f"Invalid run URI {uri}: {_reason(error)}. Use s3://, gs:// or file:///.") from error
        self._base = base.rstrip("/")
        self._uploaded: dict[str, tuple[int, int]] = {}  # (size, mtime) of uploaded files, by name
        self._damaged: set[int] = set()  # updates whose remote checkpoints are damaged

    @property
    def folder(self) -> Path | None:
        """The folder of storage on a local or mounted disk; None otherwise."""
        return Path(self._base) if self._filesystem.type_name == "local" else None

    def uri_of(self, name: str) -> str:
        """Returns the URI of a file of the run, or of the run itself if `name` is empty."""
        return join_location(self.uri, name) if name else self.uri

    def cache(self, kind: str) -> Path:
        """Returns the folder for a copy of this run in the user's cache.

        Args:
            kind: `runs` for runs that are trained, `downloads` for runs that are only read.
        """
        name = PurePosixPath(self.uri.partition("?")[0]).name
        return user_cache() / kind / hashlib.sha256(self.uri.encode()).hexdigest()[:12] / name

    def files(self) -> "dict[str, FileInfo]":
        """Lists the run's files in storage.

        Returns:
            Files by path relative to the run.

        Raises:
            StorageError: storage cannot be read.
        """
        from pyarrow.fs import FileSelector, FileType

        with self._storage_errors("read"):
            entries = self._filesystem.get_file_info(FileSelector(self._base, recursive=True, allow_not_found=True))
        files = {file.path.removeprefix(self._base).lstrip("/"): file for file in entries if file.type == FileType.File}
        return {name: file for name, file in files.items() if _is_run_file(name)}

    def updates(self) -> list[int]:
        """Returns the updates of the checkpoints in storage, in order.

        Raises:
            StorageError: storage cannot be read.
        """
        return checkpoint_updates(self.files())

    def read(self, name: str) -> bytes | None:
        """Returns a file's content, or None if the file does not exist.

        Raises:
            StorageError: storage cannot be read.
        """
        from pyarrow.fs import FileType

        with self._storage_errors("read"):
            if self._filesystem.get_file_info(self._full_path(name)).type != FileType.File:
                return None
            with self._filesystem.open_input_stream(self._full_path(name)) as file:
                return file.read()

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file atomically: readers see either the old or the new content, even after a kill.

        Raises:
            StorageError: storage cannot be written.
        """

        def write_content(path: str) -> None:
            with self._filesystem.open_output_stream(path) as file:
                file.write(content)

        # In a thread, because Ctrl-C interrupts only the main thread: an object store would publish an empty object.
        with self._atomic_target(name) as path, ThreadPoolExecutor(1) as thread:
            thread.submit(write_content, path).result()

    def remove(self, name: str) -> None:
        """Removes a file.

        Raises:
            StorageError: the file does not exist, or storage cannot be written.
        """
        with self._storage_errors("written"):
            self._filesystem.delete_file(self._full_path(name))

    def clear(self) -> None:
        """Removes all files of the run from storage.

        Raises:
            StorageError: storage cannot be written.
        """
        from pyarrow.fs import FileSelector, FileType

        with self._storage_errors("written"):
            for entry in self._filesystem.get_file_info(FileSelector(self._base, allow_not_found=True)):
                if entry.type == FileType.Directory:
                    self._filesystem.delete_dir(entry.path)
                elif not entry.base_name.startswith(WRITERS):
                    self._filesystem.delete_file(entry.path)
        self._uploaded.clear()

    def upload(self, folder: Path, keep: int, best: int | None, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Uploads new files of a run's folder, and removes old checkpoints.

        Meanwhile, training may append to files and add checkpoints, but not remove any.

        Args:
            folder: local; only one process may write to it and to this storage.
            keep: number of latest checkpoints to keep.
            best: update of the best checkpoint, which is kept too.
            cancelled: whether to stop, asked before each file. Storage then has a valid, older state of the run.

        Raises:
            StorageError: storage cannot be written. It still has a valid, older state of the run.
        """
        for update in sorted(self._damaged):  # training has resumed from an earlier checkpoint
            self.remove(f"{CHECKPOINTS}/{checkpoint_name(update)}/{manifest.NAME}")
            self._damaged.remove(update)
        remote = self.files()
        paths = sorted(Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
        local = {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}
        saved = {*checkpoint_updates(remote)}
        updates = sorted(saved.union(checkpoint_updates(local)))
        retained = {*updates[-keep:], *([best] if best in updates else [])}
        missing = {*map(checkpoint_name, retained - saved)}
        # Metrics before manifests, as on the local disk: a checkpoint always has its metrics.
        for name in sorted(local, key=lambda name: PurePosixPath(name).name == manifest.NAME):
            if cancelled():
                return
            parts = PurePosixPath(name).parts
            is_hidden = any(part.startswith(".") for part in parts)
            if parts[1] in missing if parts[0] == CHECKPOINTS else not is_hidden:
                self._upload(local[name], name)
        if best in retained:
            self.write(f"{CHECKPOINTS}/{BEST}", f"{checkpoint_name(best)}\n".encode())
        for checkpoint in self._checkpoint_names().difference(map(checkpoint_name, retained)):
            if f"{CHECKPOINTS}/{checkpoint}/{manifest.NAME}" in remote:
                self.remove(f"{CHECKPOINTS}/{checkpoint}/{manifest.NAME}")
            with self._storage_errors("written"):
                self._filesystem.delete_dir(self._full_path(f"{CHECKPOINTS}/{checkpoint}"))

    def download(self, folder: Path, patterns: Sequence[str], files: "Mapping[str, FileInfo] | None" = None) -> None:
        """Syncs a folder from storage: downloads files that differ, removes files that storage does not have.

        Args:
            folder: local; only one process may sync it at a time, but others may read.
            patterns: of the files to sync: `*` matches all but `/`; `**` at the end matches anything.
            files: the result of `files`; None: list them.

        Raises:
            StorageError: storage cannot be read.
        """
        remote = {name: file for name, file in (files or self.files()).items() if _matches_any(name, patterns)}
        for path in list(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            is_lock = name.startswith(WRITERS)
            if name not in remote and not is_lock and _matches_any(name, patterns) and path.is_file():
                path.unlink()
        for name, file in remote.items():
            path = folder / name
            if not (path.exists() and _size_and_mtime(path) == (file.size, file.mtime_ns)):
                self._download(name, path, file.mtime_ns)

    def download_checkpoint(self, folder: Path) -> None:
        """Downloads the latest valid checkpoint, and damaged later ones, so they are reported.

        Args:
            folder: the run's local folder.

        Raises:
            StorageError: storage cannot be read.
        """
        for update in reversed(self.updates()):
            checkpoint = f"{CHECKPOINTS}/{checkpoint_name(update)}"
            self.download(folder, [f"{checkpoint}/**"])
            if manifest.verify(folder / checkpoint) is None:
                return
            self._damaged.add(update)

    def _full_path(self, name: str) -> str:
        return f"{self._base}/{name}"

    def _checkpoint_names(self) -> set[str]:
        """Returns the names of the checkpoints' folders, including incomplete checkpoints."""
        from pyarrow.fs import FileSelector, FileType

        with self._storage_errors("read"):
            entries = self._filesystem.get_file_info(FileSelector(self._full_path(CHECKPOINTS), allow_not_found=True))
        names = {entry.base_name for entry in entries if entry.type == FileType.Directory}
        return {name for name in names if parse_update(name) is not None}

    def _upload(self, file: Path, name: str) -> None:
        """Uploads a file atomically if it has changed. Signals do not interrupt Arrow, so objects are never cut off."""
        from pyarrow.fs import LocalFileSystem, copy_files

        try:
            state = _size_and_mtime(file)
            if self._uploaded.get(name) != state:
                with self._atomic_target(name) as path:
                    copy_files(str(file), path, LocalFileSystem(), self._filesystem, chunk_size=COPY_CHUNK_BYTES)
                self._uploaded[name] = state
        except (FileNotFoundError, StorageError):
            if file.exists():  # otherwise its library removed it during the upload
                raise

    @contextlib.contextmanager
    def _atomic_target(self, name: str) -> Iterator[str]:
        """Yields a path to write to; the file gets its final name when the context exits."""
        path = self._full_path(name)
        with self._storage_errors("written"):
            if self._filesystem.type_name in OBJECT_STORES:
                yield path
                return
            # Several processes may write the lease at once.
            unique = f".{secrets.token_hex(4)}" if name == LEASE else ""
            part = f"{path}{unique}{PART_SUFFIX}"
            self._filesystem.create_dir(str(PurePosixPath(path).parent), recursive=True)
            try:
                yield part
                self._filesystem.move(part, path)
            except OSError:
                with contextlib.suppress(OSError):
                    self._filesystem.delete_file(part)
                raise

    def _download(self, name: str, file: Path, time: int | None) -> None:
        """Downloads a file atomically.

        Args:
            name: of the file in storage.
            file: local path.
            time: modification time in storage, in nanoseconds since 1970, which the copy gets; None: unknown.
        """
        from pyarrow.fs import LocalFileSystem, copy_files

        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f".{file.name}{PART_SUFFIX}")
        try:
            with self._storage_errors(f"copied to {file}"):
                copy_files(
                    self._full_path(name), str(part), self._filesystem, LocalFileSystem(), chunk_size=COPY_CHUNK_BYTES
                )
                if time is not None:
                    os.utime(part, ns=(time, time))
                part.replace(file)
        finally:
            part.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _storage_errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"{self.uri} cannot be {action}: {_reason(error)}.") from error


def checkpoint_updates(names: Iterable[str]) -> list[int]:
    """Returns the updates of the checkpoints whose manifests are among the file names, in order."""
    paths = [PurePosixPath(name).parts for name in names]
    folders = [path[1] for path in paths if len(path) == 3 and path[0] == CHECKPOINTS and path[2] == manifest.NAME]
    return sorted(update for update in map(parse_update, folders) if update is not None)


def _matches_any(name: str, patterns: Iterable[str]) -> bool:
    return any(
        name.startswith(pattern[:-2]) if pattern.endswith("**") else PurePosixPath("/", name).match(f"/{pattern}")
        for pattern in patterns
    )


def _is_run_file(name: str) -> bool:
    """Whether a file belongs to the run: no lock, no incomplete file, and no `..` (which bucket keys may contain)."""
    is_internal = name.startswith(WRITERS) or name.endswith(PART_SUFFIX)
    return not is_internal and not {"", ".", ".."}.intersection(name.split("/"))


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _size_and_mtime(file: Path) -> tuple[int, int]:
    """Returns a file's size in bytes and its modification time in nanoseconds since 1970."""
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns
