"""Checkpoints on disk: whole or absent, the last few and the best.

A checkpoint is written into a hidden folder beside its place, forced to the disk, and then renamed. So whatever has a
checkpoint's name is whole, and a kill at any moment leaves the previous one.
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from launch.journal import sync_folder

BEST = "best"
_NAME = re.compile(r"update_(\d{6,})")
_UNFINISHED = ".unfinished-"


class Checkpoints:
    """The `checkpoints` folder of a run: `update_000010`, ..., and the link `best`."""

    def __init__(self, folder: Path) -> None:
        """Names the folder, which may not exist yet."""
        self.folder = folder

    def save(self, update: int, write: Callable[[Path], object]) -> Path:
        """Saves a checkpoint, unless it exists.

        Args:
            update: the updates that it holds.
            write: fills the (existing, empty) folder that it is given.
        """
        self.folder.mkdir(exist_ok=True)
        place = self._place(update)
        if not place.exists():
            unfinished = self.folder / f"{_UNFINISHED}{place.name}"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            write(unfinished)
            _sync_tree(unfinished)
            unfinished.rename(place)
            sync_folder(self.folder)
        return place

    def name_best(self, update: int) -> None:
        """Points `best` to the checkpoint of an update, if that is saved."""
        place, link = self._place(update), self.folder / f"{_UNFINISHED}{BEST}"
        if place.exists() and self.best() != place.resolve():
            link.unlink(missing_ok=True)
            link.symlink_to(place.name)
            link.replace(self.folder / BEST)
            sync_folder(self.folder)

    def prune(self, keep: int) -> None:
        """Drops all checkpoints but the latest `keep` and the best."""
        best = self.best()
        for update in self._updates()[:-keep]:
            place = self._place(update)
            if place.resolve() != best:
                # Renamed first: a kill while files are being removed must not leave part of one under its name.
                leaving = self.folder / f"{_UNFINISHED}{place.name}"
                place.rename(leaving)
                shutil.rmtree(leaving)

    def latest(self) -> tuple[int, Path] | None:
        """Returns the update and folder of the latest whole checkpoint, if there is one."""
        updates = self._updates()
        return (updates[-1], self._place(updates[-1])) if updates else None

    def best(self) -> Path | None:
        """Returns the best checkpoint, if one was named."""
        link = self.folder / BEST
        return link.resolve() if link.exists() else None

    def clean(self) -> None:
        """Removes what a killed run left unfinished. Only the run that holds the lock may call this."""
        for entry in self.folder.glob(f"{_UNFINISHED}*"):
            if entry.is_symlink():
                entry.unlink()
            else:
                shutil.rmtree(entry)

    def _place(self, update: int) -> Path:
        return self.folder / f"update_{update:06d}"

    def _updates(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        matches = (_NAME.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)


def _sync_tree(top: Path) -> None:
    """Forces every file and folder under `top` to the disk."""
    for folder, _, names in os.walk(top):
        for name in names:
            with (Path(folder) / name).open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(folder))
