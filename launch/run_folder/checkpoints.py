"""Checkpoints on disk: whole or absent, the last few and the best.

A checkpoint is written into a hidden folder beside its place, gets a manifest, is forced to the disk, and then renamed.
So whatever has a checkpoint's name was whole, and a kill at any moment leaves the previous one. The manifest shows
later damage.
"""

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from launch.console.errors import CommandError
from launch.run_folder import manifest
from policies.models.atomic import UNFINISHED, atomic_dir, sync

BEST = "best"
_NAME = re.compile(r"update_(\d{6,})")
_DAMAGED = "damaged_"


class Checkpoints:
    """The `checkpoints` folder of a run: `update_000010`, ..., and the link `best`."""

    def __init__(
        self, folder: Path, shown: Callable[[Path], str] = str, fetch: Callable[[Path, str], object] | None = None
    ) -> None:
        """Names the folder.

        Args:
            folder: may not exist yet.
            shown: how a user finds a path in it.
            fetch: fills the folder of a checkpoint that is chosen, with the part of it that is asked for.
        """
        self.folder = folder
        self._shown = shown
        self._fetch = fetch

    def save(self, update: int, write: Callable[[Path], object]) -> Path:
        """Saves a checkpoint, unless it exists.

        Args:
            update: the updates that it holds.
            write: fills the (existing, empty) folder that it is given.

        Raises:
            OSError: it could not be written, as on a full disk; what was written of it is gone again.
        """
        place = self.place(update)
        if not place.exists():
            with self.saving(update) as unfinished:
                write(unfinished)
        return place

    @contextlib.contextmanager
    def saving(self, update: int) -> Iterator[Path]:
        """Yields an empty folder to fill, which becomes the checkpoint of an update that has none when this is left.

        Raises:
            OSError: it could not be written, as on a full disk; what was written of it is gone again.
        """
        self.folder.mkdir(exist_ok=True)
        with atomic_dir(self.place(update)) as unfinished:
            yield unfinished
            manifest.write(unfinished)

    def name_best(self, update: int) -> None:
        """Points `best` to the checkpoint of an update, if that is saved."""
        place, link = self.place(update), self.folder / f"{UNFINISHED}{BEST}"
        if place.exists() and self.best() != place.resolve():
            link.unlink(missing_ok=True)
            link.symlink_to(place.name)
            link.replace(self.folder / BEST)
            sync(self.folder)

    def prune(self, keep: int) -> None:
        """Drops all checkpoints but the latest `keep` and the best."""
        best = self.best()
        for update in self.updates()[:-keep]:
            place = self.place(update)
            if place.resolve() != best:
                # Renamed first: a kill while files are being removed must not leave part of one under its name.
                leaving = self.folder / f"{UNFINISHED}{place.name}"
                place.rename(leaving)
                shutil.rmtree(leaving)

    def latest(self) -> tuple[int, Path] | None:
        """Returns the update and folder of the latest checkpoint, if there is one."""
        updates = self.updates()
        return (updates[-1], self.place(updates[-1])) if updates else None

    def choose(self, wanted: str | None, part: str = "") -> tuple[int, Path]:
        """Returns the update and folder of a whole checkpoint.

        Args:
            wanted: `best`, `latest` or an update's number; None: the best, or the latest where none was evaluated.
            part: look only at files whose path begins like this.

        Raises:
            CommandError: there is no such checkpoint, it is damaged, or it cannot be brought here.
            FormatError: it was written in another format.
        """
        saved, best = self.updates(), self.best()
        if not saved:
            raise CommandError(
                f"{self._shown(self.folder)} has no checkpoint yet. Try again when the first update is saved."
            )
        named = [(BEST, update) for update in saved if self.place(update).resolve() == best]
        choices = dict([*named, ("latest", saved[-1]), *((str(update), update) for update in saved)])
        wanted = wanted or next(iter(choices))
        offer = ", ".join(name if name == str(update) else f"{name} ({update})" for name, update in choices.items())
        if wanted not in choices:
            raise CommandError(f"{self._shown(self.folder)} has no checkpoint `{wanted}`. It has: {offer}.")
        place = self.place(choices[wanted])
        if self._fetch is not None:
            self._fetch(place, part)
        fault = manifest.verify(place, part)
        if fault is not None:
            raise CommandError(f"{self._shown(place)} {fault}. Name another one with --checkpoint: {offer}.")
        return choices[wanted], place

    def quarantine_damaged(self) -> list[str]:
        """Renames the latest checkpoints until one is whole. Only the run that holds the lock may call this.

        Returns:
            A sentence on each that was renamed.

        Raises:
            FormatError: the latest checkpoint that is not damaged was written in another format.
        """
        sentences = []
        while (latest := self.latest()) and (fault := manifest.verify(latest[1])):
            aside = latest[1].with_name(f"{_DAMAGED}{latest[1].name}")
            shutil.rmtree(aside, ignore_errors=True)  # the same update's, damaged before
            latest[1].rename(aside)
            sentences.append(f"{latest[1]} {fault}; it is now {aside.name}.")
        return sentences

    def latest_valid(self) -> int:
        """Returns the update of the latest whole checkpoint; -1 if there is none.

        Raises:
            FormatError: a later one was written in another format.
        """
        updates = reversed(self.updates())
        return next((update for update in updates if manifest.verify(self.place(update)) is None), -1)

    def empty(self) -> bool:
        """Tells whether there is no checkpoint, not even a damaged one."""
        return self.latest() is None and not any(self.folder.glob(f"{_DAMAGED}*"))

    def best(self) -> Path | None:
        """Returns the best checkpoint, if one was named."""
        link = self.folder / BEST
        if link.is_file():  # as storage has it, copied to a disk
            link = self.folder / link.read_text(encoding="utf-8").strip()
        return link.resolve() if link.exists() else None

    def clean(self) -> None:
        """Removes what a killed run left unfinished. Only the run that holds the lock may call this."""
        for entry in self.folder.glob(f"{UNFINISHED}*"):
            if entry.is_symlink():
                entry.unlink()
            else:
                shutil.rmtree(entry)

    def place(self, update: int) -> Path:
        """Returns the folder of an update's checkpoint, saved or not."""
        return self.folder / name_of(update)

    def updates(self) -> list[int]:
        """Returns the updates that are saved, in order."""
        if not self.folder.is_dir():
            return []
        updates = (update_of(entry.name) for entry in self.folder.iterdir())
        return sorted(update for update in updates if update is not None)


def name_of(update: int) -> str:
    """Returns the name of the folder of an update's checkpoint."""
    return f"update_{update:06d}"


def update_of(name: str) -> int | None:
    """Returns the update that the name of a checkpoint's folder tells, None of any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None
