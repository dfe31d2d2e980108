"""Folders in the user's cache that the first process fills once, for all processes.

A folder is written atomically: it is either complete or absent, so reading it needs no lock.
"""

import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from policies.models.atomic import atomic_dir


class CacheError(Exception):
    """The user's cache cannot be written; the message names the path, the reason and the fix."""


def cached_folder(name: str, fill: Callable[[Path], object]) -> Path:
    """Returns a folder of the user's cache. The first process that needs it fills it, while others wait.

    Args:
        name: name of the folder below `user_cache()`. It must contain everything that the content depends on, since an
            existing folder is never filled again.
        fill: writes files into the empty folder that it is given. An `OSError` becomes a `CacheError`; other errors
            propagate.

    Raises:
        CacheError: the cache cannot be written, for example because the disk is full.
    """
    folder = user_cache() / name
    if not folder.is_dir():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with file_lock(folder.with_name(f".{name}.lock")):
                if not folder.is_dir():  # another process may have filled it while this one waited
                    with atomic_dir(folder) as unfinished:
                        fill(unfinished)
                        for path in unfinished.iterdir():
                            path.chmod(0o644)  # safetensors creates files that only their owner can read
        except OSError as error:
            raise CacheError(
                f"Cannot write {folder}: {error.strerror or error}. Fix that, or set XDG_CACHE_HOME to a writable "
                "folder with free space."
            ) from error
    return folder


def user_cache() -> Path:
    """Returns `$XDG_CACHE_HOME/cory-rllib`, by default `~/.cache/cory-rllib`; it may not exist yet.

    Raises:
        CacheError: XDG_CACHE_HOME is not set and the user has no home directory.
    """
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification ignores relative paths.
    cache = configured if os.path.isabs(configured) else os.path.expanduser("~/.cache")
    if not os.path.isabs(cache):
        raise CacheError("This user has no home directory for a cache. Set XDG_CACHE_HOME to a writable folder.")
    return Path(cache) / "cory-rllib"


def file_lock(file: Path) -> FileLock:
    """Returns a blocking file lock, a context manager. The kernel releases it when the process ends, even if killed."""
    return FileLock(file, fallback_to_soft=False)
