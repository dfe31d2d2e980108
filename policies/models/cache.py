"""A folder in the user's cache that one process fills once, for all: under its name it is whole, or absent.

It is filled under another name beside its place, forced to the disk, and renamed. So a kill at any moment leaves
nothing that counts, and whoever finds the folder needs no lock and writes nothing.
"""

import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from policies.models.atomic import atomic_dir


class CacheError(Exception):
    """The user's cache cannot be written; the message says where, why, and what to do."""


def cached_folder(name: str, fill: Callable[[Path], object]) -> Path:
    """Returns a folder of the user's cache, filled by the first process that asks for it; others wait meanwhile.

    The cache is `user_cache()`.

    Args:
        name: the folder's; it names whatever its content depends on, as a folder that is there is never filled again.
        fill: writes files into the (existing, empty) folder that it is given. Its errors pass, but for an `OSError`.

    Raises:
        CacheError: the cache cannot be written, as on a full disk.
    """
    place = user_cache() / name
    if not place.is_dir():
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with locked(place.with_name(f".{name}.lock")):
                if not place.is_dir():  # else another process has filled it while this one waited
                    with atomic_dir(place) as unfinished:
                        fill(unfinished)
                        for path in unfinished.iterdir():
                            path.chmod(0o644)  # safetensors makes files that only their owner can read
        except OSError as error:
            raise CacheError(
                f"{place} cannot be written: {error.strerror or error}. Correct that, or set XDG_CACHE_HOME to a "
                "folder that has room and can be written."
            ) from error
    return place


def user_cache() -> Path:
    """Returns `$XDG_CACHE_HOME/cory-rllib`, by default `~/.cache/cory-rllib`; it may not exist yet.

    Raises:
        CacheError: neither is known.
    """
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # Paths that are not absolute do not count, by the XDG base directory specification.
    cache = configured if os.path.isabs(configured) else os.path.expanduser("~/.cache")
    if not os.path.isabs(cache):
        raise CacheError("This user has no home directory for a cache. Set XDG_CACHE_HOME to a folder to use.")
    return Path(cache) / "cory-rllib"


def locked(file: Path) -> FileLock:
    """Returns a lock, which is waited for when it is entered. The kernel frees it when its holder ends, however."""
    return FileLock(file, fallback_to_soft=False)
