"""Who may write into a folder."""

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path
from typing import IO

from launch.console.errors import CommandError
from launch.run_folder.layout import LOCK

LOOK = 0.1
"""Seconds in which a look at the lock is over."""
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""What file systems say that have no locks, some over a network among them."""


class NoLocks(CommandError):
    """A folder's file system has no locks; the message says what to use instead."""


def lock_folder(path: Path) -> IO[str]:
    """Takes a folder for this process, until the file that is returned is closed.

    Raises:
        CommandError: another process has it.
        NoLocks: its file system has no locks.
    """
    lock = try_lock(path / LOCK)
    if lock is None:
        holder = lock_holder(path)
        raise CommandError(
            f"{path} is in use by another run (process {holder}). Stop it, or name another folder with --out."
        )
    return lock


def try_lock(file: Path) -> IO[str] | None:
    """Takes a lock for this process, until the file that is returned is closed.

    Args:
        file: stands for what is taken; made where it is not there, and stays.

    Returns:
        None where another process has it.

    Raises:
        NoLocks: its file system has no locks.
    """
    lock = file.open("a+")
    try:
        taken = _taken(lock)
    except OSError as error:
        lock.close()
        if error.errno not in NO_LOCKS:
            raise
        raise NoLocks(
            f"{file.parent} is on a file system without locks ({error.strerror}), where two processes could write at "
            "once. Mount it with locks, name a folder on another with --out, or for a run --out "
            f"file://{file.parent.resolve()}, which works in a local folder and is copied there."
        ) from error
    if not taken:
        lock.close()
        return None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def _taken(lock: IO[str]) -> bool:
    """Takes the lock if it is free, waiting out a `lock_holder` that is just looking."""
    for patience in (LOOK, 0.0):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(patience)
    return False


def lock_holder(path: Path) -> str | None:
    """Returns the number of the process that has a folder, or None where none on this machine has it."""
    try:
        with (path / LOCK).open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return lock.read().strip() or "unknown"
    except OSError:  # there is none, or its file system has no locks
        pass
    return None
