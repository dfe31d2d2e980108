"""Files and folders: atomic writes, locks, and the user's cache.

An atomic write is complete or absent, even if the process is killed or the disk is full.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock

UNFINISHED = ".unfinished-"
"""Prefix of the name of a folder that is being filled, or was when its process was killed."""


class MissingFolderError(FileNotFoundError):
    """A file's folder was removed or renamed. The message has the folder."""


class CacheError(Exception):
    """The user's cache cannot be written; the message names the path, the reason and the fix."""


@contextlib.contextmanager
def atomic_dir(path: Path) -> Iterator[Path]:
    """Yields an empty folder to fill; at the end its files are flushed to disk and it is renamed to `path`.

    If the process is killed, the temporary folder remains beside `path` until the next attempt removes it.
    """
    unfinished = path.with_name(f"{UNFINISHED}{path.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        with named_errors(path):
            unfinished.mkdir()
            yield unfinished
            _sync_tree(unfinished)
            unfinished.rename(path)
            sync(path.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a path to write; at the end the file is flushed to disk and replaces `path`.

    Readers see either the old or the new content.
    """
    unfinished = path.with_name(f".{path.name}.new")
    with named_errors(path):
        yield unfinished
        sync(unfinished)
        unfinished.replace(path)
        sync(path.parent)


def atomic_write(path: Path, text: str) -> None:
    """Replaces a file's content atomically (`atomic_file`)."""
    with atomic_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Adds the path to OS errors that name no file; a full disk, for example, is noticed only after `open`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not path.parent.is_dir():
            raise MissingFolderError(
                f"The folder {path.parent} no longer exists: it was removed or renamed."
            ) from error
        error.filename = error.filename or str(path)
        raise


def sync(path: Path) -> None:
    """Flushes a file's content, or a folder's entries, to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(top: Path) -> None:
    """Flushes every file and folder under `top` to disk."""
    for folder, _, names in os.walk(top):
        for name in names:
            sync(Path(folder) / name)
        sync(Path(folder))


def file_lock(file: Path) -> FileLock:
    """Returns a blocking file lock, a context manager. The kernel releases it when the process ends, even if killed."""
    return FileLock(file, fallback_to_soft=False)


def user_cache() -> Path:
    """Returns `$XDG_CACHE_HOME/cory-rllib`, by default `~/.cache/cory-rllib`; it may not exist yet."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification ignores relative paths.
    cache = configured if os.path.isabs(configured) else os.path.expanduser("~/.cache")
    if not os.path.isabs(cache):
        raise CacheError("This user has no home directory for a cache. Set XDG_CACHE_HOME to a writable folder.")
    return Path(cache) / "cory-rllib"


def cached_folder(name: str, fill: Callable[[Path], object]) -> Path:
    """Returns a folder of the user's cache. The first process that needs it fills it, while others wait.

    Args:
        name: name of the folder below `user_cache()`. It must contain everything that the content depends on, since an
            existing folder is never filled again.
        fill: writes files into the empty folder that it is given. An `OSError` becomes a `CacheError`; other errors
            propagate.
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
