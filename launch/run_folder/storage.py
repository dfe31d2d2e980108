"""A run's folder in storage, wherever `pyarrow.fs` can write: what is copied there, and back.

What arrives there is a run's folder as `run_directory` describes it, but for `checkpoints/best`, which is a file that
holds the checkpoint's name, because object stores have no links. A checkpoint's manifest is copied last and removed
first, so one that has its manifest is whole there too.
"""

import contextlib
import io
import os
import secrets
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING

from launch.console.credentials import secret_in
from launch.console.errors import IN_JOB, CommandError
from launch.console.interrupts import held
from launch.run_folder import manifest
from launch.run_folder.checkpoints import BEST, name_of, update_of
from launch.run_folder.layout import CONFIG, FINAL, LEASE, LOCK, METRICS, ORIGIN, SAMPLES, SOURCES

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo, FileSystem

CHECKPOINTS = "checkpoints"
LOOKED_AT = (CONFIG, SOURCES, METRICS, f"{CHECKPOINTS}/{BEST}")
"""What is read of a run, beside a checkpoint."""
REFUSED_FILES = "refused_update_*"
REPORTED = (*LOOKED_AT, SAMPLES, FINAL, REFUSED_FILES, "evaluation/*/evaluation.json")
"""What a report reads of a run."""
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


def check_place(place: str, what: str = "run") -> None:
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
        return list(self._entries())

    def _entries(self) -> "dict[str, FileInfo]":
        from pyarrow.fs import FileSelector, FileType

        try:
            found = self._files.get_file_info(FileSelector(self._base, recursive=True, allow_not_found=True))
        except OSError as error:
            raise self._unreachable("read", error) from error
        files = {file.path.removeprefix(self._base).lstrip("/"): file for file in found if file.type == FileType.File}
        return {name: file for name, file in files.items() if _is_of_run(name)}

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

    def find(self, name: str) -> bytes | None:
        """Returns a file's content, or None where there is no such file.

        Raises:
            StorageError: storage cannot be read.
        """
        from pyarrow.fs import FileType

        try:
            there = self._files.get_file_info(self._at(name)).type == FileType.File
        except OSError as error:
            raise self._unreachable("read", error) from error
        return self.read(name) if there else None

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, in one step.

        Raises:
            StorageError: storage cannot be written.
        """
        self._store(name, io.BytesIO(content))

    def remove(self, name: str) -> None:
        """Removes a file.

        Raises:
            StorageError: it is not there, or storage cannot be written.
        """
        try:
            self._files.delete_file(self._at(name))
        except OSError as error:
            raise self._unreachable("written", error) from error

    def below(self, name: str) -> str:
        """Returns the URI of a file there."""
        return child(self.uri, name)

    @property
    def name(self) -> str:
        """The run's."""
        return PurePosixPath(self.uri.partition("?")[0]).name

    @property
    def folder(self) -> Path | None:
        """Where it lies if that is on a disk of this machine, or one that is mounted."""
        return Path(self._base) if self._files.type_name == "local" else None

    def fetch(self, folder: Path) -> None:
        """Copies a run's own files, but no checkpoint.

        Args:
            folder: local, made if it does not exist; files of the same name are replaced.

        Raises:
            StorageError: storage cannot be read.
        """
        for name in self.names():
            if "/" not in name and not name.startswith("."):
                self._get(name, folder / name)

    def fetch_checkpoint(self, folder: Path) -> None:
        """Copies the latest checkpoint that is whole, and later ones, which are damaged, to be reported.

        Args:
            folder: the run's, local.

        Raises:
            StorageError: storage cannot be read.
        """
        names = self.names()
        for update in reversed(self.updates(names)):
            place = f"{CHECKPOINTS}/{name_of(update)}"
            for name in names:
                if name.startswith(f"{place}/"):
                    self._get(name, folder / name)
            if manifest.fault(folder / place) is None:
                return
            self._damaged.add(update)

    def refresh(self, folder: Path, patterns: Sequence[str] = LOOKED_AT) -> None:
        """Makes a folder the copy of a run to look at: some files, and an empty folder for each new checkpoint.

        Args:
            folder: local, for nothing else; only one process may do this at a time, others may read meanwhile.
            patterns: of the files' names, in the order in which they are copied; `*` stands for no `/`.

        Raises:
            StorageError: storage cannot be read.
        """
        there = self._entries()
        for pattern in patterns:
            for file in folder.glob(pattern):
                if file.relative_to(folder).as_posix() not in there:
                    file.unlink()
            for name in there:
                file = folder / name
                if PurePosixPath("/", name).match(f"/{pattern}") and not (
                    file.exists() and _state(file) == (there[name].size, there[name].mtime_ns)
                ):
                    self._get(name, file, there[name].mtime_ns)
        checkpoints, saved = folder / CHECKPOINTS, set(map(name_of, self.updates(there)))
        checkpoints.mkdir(exist_ok=True)
        for entry in checkpoints.iterdir():
            if update_of(entry.name) is not None and entry.name not in saved:
                shutil.rmtree(entry)
        for checkpoint in saved:
            (checkpoints / checkpoint).mkdir(exist_ok=True)

    def bring(self, checkpoint: Path, part: str) -> None:
        """Copies the files of a checkpoint whose path in it begins with `part`, unless they are in the folder already.

        Args:
            checkpoint: a folder that `refresh` made; only one process may do this at a time.
            part: of the checkpoint.

        Raises:
            StorageError: storage cannot be read.
        """
        place = f"{CHECKPOINTS}/{checkpoint.name}"
        seal, own = self.read(f"{place}/{manifest.NAME}"), checkpoint / manifest.NAME
        if not own.exists() or own.read_bytes() != seal or manifest.fault(checkpoint, part):
            for name in self.names():
                if name.startswith(f"{place}/{part}"):
                    self._get(name, checkpoint / name.removeprefix(f"{place}/"))
            self._get(f"{place}/{manifest.NAME}", own)

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
            self.write(f"{CHECKPOINTS}/{BEST}", f"{name_of(best)}\n".encode())
        present = {name.split("/")[1] for name in there if name.startswith(f"{CHECKPOINTS}/")}
        for checkpoint in present - {BEST, *map(name_of, kept)}:
            self._remove(f"{CHECKPOINTS}/{checkpoint}", there)
        self._damaged.clear()

    def clear(self) -> None:
        """Removes all of the run that is there.

        Raises:
            StorageError: storage cannot be written.
        """
        from pyarrow.fs import FileSelector, FileType

        try:
            for entry in self._files.get_file_info(FileSelector(self._base, allow_not_found=True)):
                if entry.type == FileType.Directory:
                    self._files.delete_dir(entry.path)
                elif not entry.base_name.startswith((LOCK, LEASE)):
                    self._files.delete_file(entry.path)
        except OSError as error:
            raise self._unreachable("written", error) from error
        self._sent.clear()

    def _at(self, name: str) -> str:
        return f"{self._base}/{name}"

    def _get(self, name: str, file: Path, time: int | None = None) -> None:
        """Copies a file here, in one step, with its time of change there in nanoseconds since 1970 if that is known."""
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_name(f".{file.name}.part")
        try:
            with self._files.open_input_stream(self._at(name)) as source, beside.open("wb") as target:
                shutil.copyfileobj(source, target, 2**24)
            if time is not None:
                os.utime(beside, ns=(time, time))
            beside.replace(file)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise self._unreachable(f"copied to {file}", error) from error

    def _put(self, file: Path, name: str) -> None:
        try:
            source = file.open("rb")
        except FileNotFoundError:  # another library's, removed meanwhile
            return
        with source:
            state = _state(source.fileno())
            if self._sent.get(name) != state:
                self._store(name, source)
                self._sent[name] = state

    def _store(self, name: str, source: IO[bytes]) -> None:
        """Writes a file; a reader or a kill finds the old one or the new one.

        Leaving an object store's stream, even by an error, ends the file there. So signals wait, and all that no seal
        vouches for, the seal too, is read before.
        """
        direct = self._files.type_name in OBJECT_STORES
        own = f".{secrets.token_hex(4)}" if name == LEASE else ""  # which several may write at once
        target = self._at(name) if direct else f"{self._at(name)}{own}.part"
        try:
            with held() if direct else contextlib.nullcontext():
                if direct and (not name.startswith(f"{CHECKPOINTS}/") or name.endswith(f"/{manifest.NAME}")):
                    source = io.BytesIO(source.read())
                if not direct:
                    self._files.create_dir(str(PurePosixPath(target).parent), recursive=True)
                with self._files.open_output_stream(target) as stream:
                    shutil.copyfileobj(source, stream, 2**24)
                if not direct:
                    self._files.move(target, self._at(name))
        except OSError as error:
            with contextlib.suppress(OSError):
                self._files.delete_file(f"{self._at(name)}{own}.part")
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


def _is_of_run(name: str) -> bool:
    """Tells whether a file may be a run's: none that says who may write, and none with `..`, as a bucket may hold."""
    return not name.startswith((LOCK, LEASE)) and not {"", ".", ".."}.intersection(name.split("/"))


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _state(file: Path | int) -> tuple[int, int]:
    """Returns the size of a file, and when it changed, in nanoseconds since 1970."""
    stat = os.stat(file)
    return stat.st_size, stat.st_mtime_ns
