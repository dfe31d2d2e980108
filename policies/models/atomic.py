"""A folder that is whole or absent, whenever the process is killed and whenever the disk is full."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

UNFINISHED = ".unfinished-"
"""How the name of a folder starts that is still being filled, or was when the process was killed."""


@contextlib.contextmanager
def atomic_dir(place: Path) -> Iterator[Path]:
    """Yields an empty folder to fill, which takes the name `place` when all that is in it is on the disk.

    What a kill leaves lies beside `place` under another name, and goes at the next attempt.

    Args:
        place: does not exist yet, or is an empty folder.

    Raises:
        OSError: it could not be written, as on a full disk; what was written of it is gone again.
    """
    unfinished = place.with_name(f"{UNFINISHED}{place.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        with named_errors(place):
            unfinished.mkdir()
            yield unfinished
            _sync_tree(unfinished)
            unfinished.rename(place)
            sync(place.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Writes the path into errors of the operating system that name none: a full disk is noticed after `open`."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def sync(path: Path) -> None:
    """Makes a file's content, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(top: Path) -> None:
    """Forces every file and folder under `top` to the disk."""
    for folder, _, names in os.walk(top):
        for name in names:
            sync(Path(folder) / name)
        sync(Path(folder))
