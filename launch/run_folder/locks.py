"""Who may write into a folder, and who does. The kernel frees a lock when its holder ends, however that happens."""

import contextlib
import errno
import fcntl
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from launch.console.errors import CommandError, FolderError
from launch.run_folder.layout import LOCK

LOOK = 0.1
"""Seconds in which a look at the lock is over."""
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""What file systems say that have no locks, some over a network among them."""


class NoLocks(CommandError):
    """A folder's file system has no locks; the message says what to use instead."""


def lock_folder(path: Path) -> contextlib.ExitStack:
    """Takes a folder for this process, until what is returned is closed.

    Raises:
        CommandError: another process has it.
        NoLocks: its file system has no locks.
    """
    lock = try_lock(path / LOCK)
    if lock is None:
        raise CommandError(
            f"{path} is in use by another run (process {lock_holder(path)}). Stop it, or name another folder with "
            "--out."
        )
    return lock


def try_lock(file: Path) -> contextlib.ExitStack | None:
    """Takes a lock for this process, until what is returned is closed.

    Args:
        file: stands for what is taken; made where it is not there, and stays. It says who has it.

    Returns:
        None where another process has it.

    Raises:
        NoLocks: its file system has no locks.
    """
    held = contextlib.ExitStack()
    try:
        # A lock that is no more than a file's existence would outlive a kill. `LOOK`: a `lock_holder` may be looking.
        held.enter_context(FileLock(file, timeout=LOOK, fallback_to_soft=False, on_acquired=_sign))
    except Timeout:
        return None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise NoLocks(
            f"{file.parent} is on a file system without locks ({error.strerror}), where two processes could write at "
            "once. Mount it with locks, name a folder on another with --out, or for a run --out "
            f"file://{file.parent.resolve()}, which works in a local folder and is copied there."
        ) from error
    return held


def _sign(descriptor: int) -> None:
    """Writes into a lock who has it."""
    os.truncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()} on {platform.node()}".encode())


def lock_holder(path: Path) -> str | None:
    """Returns the process that has a folder, as `123 on host`, or None where none is seen to have it.

    That takes no more than the right to read, and keeps nobody out.
    """
    try:
        with (path / LOCK).open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return lock.read().strip() or "unknown"
    except OSError:  # there is none, or its file system has no locks
        pass
    return None


class FolderHandle:
    """An open folder, which is found again when it is renamed. A context, which closes it."""

    def __init__(self, path: Path) -> None:
        """Opens a folder."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def in_place(self) -> bool:
        """Tells whether the folder still has its path; another folder that has it now does not count."""
        return self._is_at(self.path)

    def find(self) -> Path:
        """Returns the folder's present path, relative to the working directory if it is below that.

        Raises:
            FolderError: it was removed, or moved to another file system.
        """
        if self.in_place():
            return self.path
        path = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
        if not self._is_at(path):
            raise FolderError(f"The folder {self.path} is gone: it was removed, or moved to another disk.")
        working = Path.cwd()
        return path.relative_to(working) if path.is_relative_to(working) else path

    def check(self) -> None:
        """Makes sure that the folder still has its path.

        Raises:
            FolderError: it was renamed or removed.
        """
        if not self.in_place():
            raise FolderError(f"The folder {self.path} was renamed to {self.find()} meanwhile.")

    def _is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._descriptor))
        except OSError:
            return False


@contextlib.contextmanager
def folder_watched(path: Path, resume_hint: Callable[[Path], str]) -> Iterator[FolderHandle]:
    """Replaces any error by one sentence if a folder was renamed or removed meanwhile, which explains it.

    Args:
        path: the folder.
        resume_hint: says how to resume in the folder's new path.

    Raises:
        FolderError: it was renamed or removed.
    """
    with FolderHandle(path) as handle:
        try:
            yield handle
        except Exception as error:
            if handle.in_place():
                raise
            renamed = handle.find()
            raise FolderError(
                f"The folder {path} was renamed to {renamed} meanwhile. {resume_hint(renamed)}"
            ) from error
