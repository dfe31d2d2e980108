"""Atomic checkpoints on disk: the latest few and the best.

A checkpoint is written to a hidden folder, gets a manifest, is synced to disk, and is then renamed. So a folder with a
checkpoint's name was complete, and after a kill at any moment the previous checkpoint is still there. The manifest
detects later damage.
"""

import contextlib
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from launch.console.errors import CommandError
from launch.run_folder import manifest
from policies.files import UNFINISHED, atomic_dir, sync

BEST = "best"
UNTRAINED = (
    "These are the weights before training (update 0), which `best` has if no later evaluation was better. The "
    "checkpoint `latest` has the trained ones."
)
_NAME = re.compile(r"update_(\d{6,})")
_DAMAGED_PREFIX = "damaged_"


class Checkpoints:
    """The `checkpoints` folder of a run: `update_000010`, ..., and the link `best`."""

    def __init__(self, folder: Path) -> None:
        """Initializes without reading or creating anything; the `checkpoints` folder may not exist yet."""
        self.folder = folder

    def save(self, update: int, write: Callable[[Path], object]) -> Path:
        """Saves a checkpoint, unless it exists.

        Args:
            write: fills the existing, empty folder that it is passed.

        Returns:
            The checkpoint's folder.
        """
        path = self.path_of(update)
        if not path.exists():
            with self.saving(update) as unfinished:
                write(unfinished)
        return path

    @contextlib.contextmanager
    def saving(self, update: int) -> Iterator[Path]:
        """Yields an empty folder, which becomes the update's checkpoint when the context exits.

        Args:
            update: number of finished updates; must have no checkpoint yet.
        """
        self.folder.mkdir(exist_ok=True)
        with atomic_dir(self.path_of(update)) as unfinished:
            yield unfinished
            manifest.write_manifest(unfinished)

    def name_best(self, update: int) -> None:
        """Points `best` to the checkpoint of an update, if that is saved."""
        path, link = self.path_of(update), self.folder / f"{UNFINISHED}{BEST}"
        if path.exists() and self.best() != path.resolve():
            link.unlink(missing_ok=True)
            link.symlink_to(path.name)
            link.replace(self.folder / BEST)
            sync(self.folder)

    def prune(self, keep: int, protected: Collection[int] = ()) -> None:
        """Removes all checkpoints except the latest `keep`, the best, and those of the updates in `protected`."""
        best = self.best()
        for update in self.updates()[:-keep]:
            path = self.path_of(update)
            if path.resolve() != best and update not in protected:
                # Renamed first, so that a kill during the removal leaves no incomplete checkpoint under its name.
                renamed = self.folder / f"{UNFINISHED}{path.name}"
                path.rename(renamed)
                shutil.rmtree(renamed)

    def latest(self) -> tuple[int, Path] | None:
        """Returns the update and folder of the latest checkpoint, if there is one."""
        updates = self.updates()
        return (updates[-1], self.path_of(updates[-1])) if updates else None

    def choose(self, name: str | int | None, part: str = "") -> tuple[int, Path]:
        """Returns the update and folder of a valid checkpoint.

        Args:
            name: `best`, `latest` or an update's number; None: `best`, or `latest` if none was evaluated.
            part: verify only files whose paths start with this prefix.
        """
        saved, best = self.updates(), self.best()
        if not saved:
            raise CommandError(f"{self.folder} has no checkpoint yet. Try again when the first update is saved.")
        best_choice = [(BEST, update) for update in saved if self.path_of(update).resolve() == best]
        choices = dict([*best_choice, ("latest", saved[-1]), *((str(update), update) for update in saved)])
        name = next(iter(choices)) if name is None else str(name)
        listing = ", ".join(key if key == str(update) else f"{key} ({update})" for key, update in choices.items())
        if name not in choices:
            raise CommandError(f"{self.folder} has no checkpoint `{name}`. It has: {listing}.")
        path = self.path_of(choices[name])
        problem = manifest.verify(path, part)
        if problem is not None:
            raise CommandError(f"{path} {problem}. Choose another one with --checkpoint: {listing}.")
        return choices[name], path

    def quarantine_damaged(self) -> list[str]:
        """Renames damaged checkpoints, from the latest back to the first valid one. Requires the run's lock.

        Returns:
            A sentence about each renamed checkpoint.
        """
        sentences = []
        while (latest := self.latest()) and (problem := manifest.verify(latest[1])):
            quarantined = latest[1].with_name(f"{_DAMAGED_PREFIX}{latest[1].name}")
            shutil.rmtree(quarantined, ignore_errors=True)  # an earlier damaged checkpoint of the same update
            latest[1].rename(quarantined)
            sentences.append(f"{latest[1]} {problem}; it is now {quarantined.name}.")
        return sentences

    def latest_valid(self) -> int:
        """Returns the update of the latest valid checkpoint; -1 if there is none."""
        updates = reversed(self.updates())
        return next((update for update in updates if manifest.verify(self.path_of(update)) is None), -1)

    def empty(self) -> bool:
        """Whether there is no checkpoint, not even a damaged one."""
        return self.latest() is None and not any(self.folder.glob(f"{_DAMAGED_PREFIX}*"))

    def best(self) -> Path | None:
        """Returns the folder of the best checkpoint, if there is one."""
        link = self.folder / BEST
        if link.is_file():  # a copy of a run in storage, which has a file instead of a link
            link = self.folder / link.read_text(encoding="utf-8").strip()
        return link.resolve() if link.exists() else None

    def clean(self) -> None:
        """Removes unfinished checkpoints of a killed run. Requires the run's lock."""
        remove_all(self.folder.glob(f"{UNFINISHED}*"))

    def path_of(self, update: int) -> Path:
        """Returns the path of an update's checkpoint, saved or not."""
        return self.folder / checkpoint_name(update)

    def updates(self) -> list[int]:
        """Returns the saved updates, in order."""
        updates = (parse_update(entry.name) for entry in self.folder.glob("*"))
        return sorted(update for update in updates if update is not None)


def remove_all(paths: Iterable[Path]) -> None:
    """Removes files and folders, if they exist."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def checkpoint_name(update: int) -> str:
    """Returns the folder name of an update's checkpoint."""
    return f"update_{update:06d}"


def parse_update(name: str) -> int | None:
    """Returns the update in a checkpoint's folder name; None for other names."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None
