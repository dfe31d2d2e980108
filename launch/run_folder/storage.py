"""A run in remote storage: a bucket, or any other file system of `pyarrow.fs`.

The layout is that of a run's folder (`launch.run_folder.layout`), except that `checkpoints/best` is a file with the
checkpoint's name, because object stores have no links. A checkpoint's manifest is uploaded last and removed first: a
folder without a manifest is not a checkpoint.

A process takes a run over by writing its own id into the object `WRITER`. Any other process that still writes there
finds that id before its next file, and stops.
"""

import contextlib
import hashlib
import os
import platform
import secrets
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from cory_env.home import IN_JOB
from launch.console.credentials import find_secret
from launch.console.errors import CommandError
from launch.run_folder import manifest
from launch.run_folder.checkpoints import BEST, checkpoint_name, parse_update
from launch.run_folder.layout import CHECKPOINTS, CONFIG, WRITER
from policies.files import user_cache

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

OBJECT_STORES = ("s3", "gcs", "abfs")  # they publish a file only when it is complete, and have no folders
PART_SUFFIX = ".part"  # of incomplete files: still being written, or left by a killed process
COPY_CHUNK_BYTES = 2**24


class StorageError(CommandError):
    """Storage cannot be read or written. The message has the URI, the reason and a remedy."""


class WriterChangedError(CommandError):
    """Another process has taken the run over. The message has that process and this process's local folder."""


def is_uri(location: str) -> bool:
    """Whether a location is a URI rather than a path."""
    return "://" in location


def check_location(location: str, kind: str = "run") -> None:
    """Rejects a folder that would be lost after a Ray job, a URI with a secret, and other URIs unless for a `run`."""
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


def reject_uri(location: str) -> None:
    """Rejects a URI, for commands that read a run."""
    if is_uri(location):
        check_location(location)  # not to repeat a secret
        raise CommandError(
            f"{location} is a URI, which only `cory train` takes (--out, --resume). Mount the bucket, or copy the run "
            "to a folder, for example with `aws s3 sync URI DIR`."
        )


class Storage:
    """A run's files at a URI.

    The first write of a process takes the run over, unless it called `take_over` before. Methods raise a `StorageError`
    if storage cannot be read or written, and a `WriterChangedError` if another process has taken the run over.
    """

    def __init__(self, uri: str, filesystem: "tuple[FileSystem, str] | None" = None) -> None:
        """Resolves the URI, as accepted by `pyarrow.fs.FileSystem.from_uri`, without reading anything.

        `filesystem` is a file system and a path in it; None: those of the URI.
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
        self._writer: str | None = None  # this process's id, once it has taken the run over
        self.resumed_after: int | None = None
        """The update from which training resumed. The next upload removes later checkpoints from storage."""

    def uri_of(self, name: str) -> str:
        """Returns the URI of a file of the run, or of the run itself if `name` is empty."""
        path, mark, query = self.uri.partition("?")
        return f"{path}/{name}{mark}{query}" if name else self.uri

    def cache(self) -> Path:
        """Returns the folder in the user's cache in which this run trains."""
        name = PurePosixPath(self.uri.partition("?")[0]).name
        return user_cache() / "runs" / hashlib.sha256(self.uri.encode()).hexdigest()[:12] / name

    def files(self) -> list[str]:
        """Returns the paths of the run's files in storage, relative to the run."""
        return [name for name in self._all_files() if not name.startswith(".") and not name.endswith(PART_SUFFIX)]

    def updates(self) -> list[int]:
        """Returns the updates of the checkpoints in storage, in order."""
        return checkpoint_updates(self.files())

    def read(self, name: str) -> bytes | None:
        """Returns a file's content, or None if the file does not exist."""
        with self._storage_errors("read"):
            if not self._filesystem.get_file_info(self._full_path(name)).is_file:
                return None
            with self._filesystem.open_input_stream(self._full_path(name)) as file:
                return file.read()

    def take_over(self) -> str:
        """Makes this process the run's only writer: any other one ends at its next upload. Returns its new id."""
        writer = f"{secrets.token_hex(8)} {os.getpid()} on {platform.node()}"
        self._write(WRITER, writer)
        self._writer = writer
        return writer

    def clear(self) -> None:
        """Removes all files of the run from storage."""
        names = {name.partition("/")[0] for name in self.files()}
        for name in sorted(names, key=lambda name: name == CONFIG):  # last: without it, the rest is no run's
            self.remove(name)

    def remove(self, name: str) -> None:
        """Removes a file or a folder of the run from storage."""
        self._check_writer()
        path = self._full_path(name)
        with self._storage_errors("written"):
            if self._filesystem.get_file_info(path).is_file:
                self._filesystem.delete_file(path)
            else:
                self._filesystem.delete_dir(path)

    def upload(self, folder: Path, keep: int, best: int | None, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Uploads a run's folder except checkpoints that storage has, and removes old checkpoints.

        Meanwhile, training may append to files and add checkpoints, but not remove any. If the upload fails or is
        cancelled, storage has a valid, older state of the run.

        Args:
            folder: local; only one process may write to it.
            best: update of the best checkpoint, which is kept too.
        """
        remote = {*self._all_files()}
        saved = {*checkpoint_updates(remote)}
        obsolete = [] if self.resumed_after is None else [update for update in saved if update > self.resumed_after]
        for update in obsolete:  # damaged, or of the process that was taken over
            self.remove(f"{CHECKPOINTS}/{checkpoint_name(update)}/{manifest.NAME}")
            saved.remove(update)
        self.resumed_after = None
        paths = sorted(Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
        local = {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}
        updates = sorted(saved.union(checkpoint_updates(local)))
        retained = {*updates[-keep:], *([best] if best in updates else [])}
        missing = {*map(checkpoint_name, retained - saved)}
        # Metrics before manifests, as on the local disk: a checkpoint always has its metrics.
        for name in sorted(local, key=lambda name: PurePosixPath(name).name == manifest.NAME):
            if cancelled():
                return
            parts = PurePosixPath(name).parts
            is_hidden = any(part.startswith(".") for part in parts)
            is_wanted = parts[1] in missing if parts[0] == CHECKPOINTS else not is_hidden
            if is_wanted and local[name].exists():  # libraries remove some of their files
                self._upload(local[name], name)
        if best in retained:
            self._write(f"{CHECKPOINTS}/{BEST}", f"{checkpoint_name(best)}\n")
        for checkpoint in {PurePosixPath(name).parts[1] for name in remote if name.startswith(f"{CHECKPOINTS}/")}:
            number = parse_update(checkpoint)
            if number is not None and number not in retained:
                if number in saved:
                    self.remove(f"{CHECKPOINTS}/{checkpoint}/{manifest.NAME}")
                self.remove(f"{CHECKPOINTS}/{checkpoint}")

    def download(self, folder: Path) -> None:
        """Downloads the run's files. Not folders, whose files training only adds: checkpoints, those of trackers."""
        for name in self.files():
            if "/" not in name:
                self._download(name, folder)

    def download_checkpoint(self, folder: Path) -> None:
        """Downloads the latest valid checkpoint, and damaged later ones, so they are reported."""
        files = self.files()
        for update in reversed(checkpoint_updates(files)):
            checkpoint = f"{CHECKPOINTS}/{checkpoint_name(update)}"
            for name in files:
                if name.startswith(f"{checkpoint}/"):
                    self._download(name, folder)
            if manifest.verify(folder / checkpoint) is None:
                return

    def _check_writer(self) -> None:
        """Checks that this process is the run's only writer; its first write makes it so.

        Called before each file that is written or removed, so a process that was taken over may still change the one
        file that it is busy with. The new writer copes with each of them: it uploads the records again with each
        checkpoint, it removes checkpoints after the one that it resumed from, and the manifest of its own checkpoint
        does not match another process's file.
        """
        if self._writer is None:
            self.take_over()
        elif (writer := self.read(WRITER)) != self._writer.encode():
            process = "another process" if writer is None else f"process {writer.decode().partition(' ')[2]}"
            raise WriterChangedError(
                f"{self.uri} was taken over by {process}, so this process uploads nothing more. Its results are in "
                f"{self.cache()} on {platform.node()}."
            )

    def _full_path(self, name: str) -> str:
        return f"{self._base}/{name}"

    def _all_files(self) -> list[str]:
        """Returns the paths of all files, also incomplete ones, except those with `..`, which bucket keys may have."""
        from pyarrow.fs import FileSelector

        with self._storage_errors("read"):
            entries = self._filesystem.get_file_info(FileSelector(self._base, recursive=True, allow_not_found=True))
        names = [entry.path.removeprefix(self._base).lstrip("/") for entry in entries if entry.is_file]
        return [name for name in names if not {"", ".", ".."}.intersection(name.split("/"))]

    def _upload(self, file: Path, name: str) -> None:
        """Uploads a file atomically. Signals do not interrupt Arrow, so objects are never cut off."""
        from pyarrow.fs import LocalFileSystem, copy_files

        try:
            with self._atomic_target(name) as path:
                copy_files(str(file), path, LocalFileSystem(), self._filesystem, chunk_size=COPY_CHUNK_BYTES)
        except StorageError:
            if file.exists():  # otherwise its library removed it during the upload
                raise

    def _write(self, name: str, content: str) -> None:
        """Writes a small file atomically: readers see either the old or the new content, even after a kill."""

        def write_content(path: str) -> None:
            with self._filesystem.open_output_stream(path) as file:
                file.write(content.encode())

        # In a thread, because Ctrl-C interrupts only the main thread: an object store would publish an empty object.
        with self._atomic_target(name) as path, ThreadPoolExecutor(1) as thread:
            thread.submit(write_content, path).result()

    @contextlib.contextmanager
    def _atomic_target(self, name: str) -> Iterator[str]:
        """Yields a path to write to; the file gets its final name when the context exits."""
        if name != WRITER:
            self._check_writer()
        path = self._full_path(name)
        with self._storage_errors("written"):
            if self._filesystem.type_name in OBJECT_STORES:
                yield path
                return
            # Several processes may take the run over at once.
            unique = f".{secrets.token_hex(4)}" if name == WRITER else ""
            part = f"{path}{unique}{PART_SUFFIX}"
            self._filesystem.create_dir(str(PurePosixPath(path).parent), recursive=True)
            try:
                yield part
                self._filesystem.move(part, path)
            except OSError:
                with contextlib.suppress(OSError):
                    self._filesystem.delete_file(part)
                raise

    def _download(self, name: str, folder: Path) -> None:
        """Downloads a file into the run's folder, where a copy that was cut off has no valid checkpoint."""
        from pyarrow.fs import LocalFileSystem, copy_files

        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with self._storage_errors(f"copied to {file}"):
            copy_files(
                self._full_path(name), str(file), self._filesystem, LocalFileSystem(), chunk_size=COPY_CHUNK_BYTES
            )

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


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
