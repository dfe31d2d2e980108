"""Atomic writes of folders: complete or absent, even if the process is killed or the disk is full."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

UNFINISHED = ".unfinished-"
"""Prefix of the name of a folder that is being filled, or was when its process was killed."""


@contextlib.contextmanager
def atomic_dir(path: Path) -> Iterator[Path]:
    """Yields an empty folder to fill; at the end its files are flushed to disk and it is renamed to `path`.

    If the process is killed, the temporary folder remains beside `path` until the next attempt removes it.

    Args:
        path: does not exist yet, or is an empty folder.

    Raises:
        OSError: the folder could not be written, for example because the disk is full; it is removed.
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
def named_errors(path: Path) -> Iterator[None]:
    """Adds the path to OS errors that name no file; a full disk, for example, is noticed only after `open`."""
    try:
        yield
    except OSError as error:
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
