"""Who may write into a folder, and who does. The kernel frees a lock when its holder ends, however that happens."""

import contextlib
import errno
import fcntl
import os
import platform
from pathlib import Path

from filelock import FileLock, Timeout

from launch.console.errors import CommandError
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
