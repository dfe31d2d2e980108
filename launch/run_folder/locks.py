"""File locks on folders. The kernel releases a lock when its process ends, even after a kill."""

import contextlib
import errno
import fcntl
import os
import platform
from pathlib import Path

from filelock import FileLock, Timeout

from cory_env.home import job_id
from launch.console.errors import CommandError
from launch.run_folder.layout import LOCK

LOCK_TIMEOUT = 0.1
"""Seconds to wait for a lock. Longer than `lock_holder` holds one to check it."""
UNSUPPORTED_ERRNOS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of file systems without locks, such as some network file systems."""


def lock_folder(path: Path) -> contextlib.ExitStack:
    """Locks a folder for this process.

    Returns:
        A context; closing it releases the lock.
    """
    lock = try_lock(path / LOCK)
    if lock is None:
        raise CommandError(
            f"{path} is in use by another run (process {lock_holder(path)}). Stop it, or choose another folder with "
            "--out."
        )
    return lock


def try_lock(file: Path) -> contextlib.ExitStack | None:
    """Acquires a lock for this process, if it is free.

    Args:
        file: the lock file, created if missing and never removed. It contains the process that holds the lock.

    Returns:
        A context that releases the lock when closed; None if another process holds the lock.
    """
    lock = contextlib.ExitStack()
    try:
        # No soft lock, which would outlive a kill. The timeout is for a `lock_holder` that checks the lock.
        lock.enter_context(FileLock(file, timeout=LOCK_TIMEOUT, fallback_to_soft=False, on_acquired=_write_holder))
    except Timeout:
        return None
    except OSError as error:
        if error.errno not in UNSUPPORTED_ERRNOS:
            raise
        raise CommandError(
            f"{file.parent} is on a file system without locks ({error.strerror}). Mount it with locks, or set --out to "
            f"another folder, or (for a run) to file://{file.parent.resolve()}, to which a local folder is uploaded."
        ) from error
    return lock


def _write_holder(descriptor: int) -> None:
    """Writes this process into its lock file; in a Ray job also the job's id, so that `ray job stop` can end it."""
    job = job_id()
    os.truncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()} on {platform.node()}{'' if job is None else f', Ray job {job}'}".encode())


def lock_holder(path: Path) -> str | None:
    """Returns the process that holds a folder's lock, as `123 on host`; None if none is visible.

    Requires only read permission, and does not block other processes.
    """
    try:
        with (path / LOCK).open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return lock.read().strip() or "unknown"
    except OSError:  # there is no lock file, or the file system has no locks
        pass
    return None
