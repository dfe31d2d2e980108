"""Work that is done batch by batch. Each is kept as soon as it is done, so a killed command goes on from there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from launch.console.errors import CommandError
from launch.display.terminal import ProgressPrinter
from launch.run_folder.journal import Journal

MAX_PROGRESS_LINES = 20
"""Lines of progress, at most, where there is no bar."""
T = TypeVar("T")


class Batches(Generic[T]):
    """A JSON Lines file: a line that says what the work is, `{"batch": -1, "identity": ...}`, and one per batch."""

    def __init__(self, path: Path, identity: Mapping[str, Any], work: Sequence[T], *, restart: bool = False) -> None:
        """Begins the file, or continues one.

        Args:
            path: the file, which only this process may write.
            identity: everything that the results depend on, as JSON; entries of `settings` are compared one by one.
            work: the batches.
            restart: begin anew if the file holds other work.

        Raises:
            CommandError: the file holds other work; names what differs.
        """
        self.work = work
        self.done = 0
        """Batches that are done."""
        self._journal = Journal(path, number="batch")
        if lines := self._journal.read():
            differing = _differing_entries(lines[0].get("identity", {}), json.loads(json.dumps(identity)))
            if not differing:
                self.done = lines[-1]["batch"] + 1
                self._journal.cut_after(self.done - 1)  # what a kill left of a line
                return
            if not restart:
                raise CommandError(
                    f"{path} holds other work: its {', '.join(differing)} differed. Name another place with --out."
                )
        path.unlink(missing_ok=True)
        self._journal.append({"batch": -1, "identity": identity})

    @property
    def path(self) -> Path:
        """The file."""
        return self._journal.path

    @property
    def results(self) -> list[dict[str, Any]]:
        """What was kept of each batch that is done, in order."""
        return self._journal.read()[1:]

    def run(self, do: Callable[[T], Mapping[str, object]], voice: ProgressPrinter) -> None:
        """Does what is left to do.

        Args:
            do: does a batch, and returns what is kept of it.
            voice: shows how far the work is; a step is a batch.

        Raises:
            KeyboardInterrupt: Ctrl-C; how much is kept is told before.
        """
        total = len(self.work)
        voice.begin()
        try:
            for batch in self.work[self.done :]:
                self._journal.append({"batch": self.done, **do(batch)})
                self.done += 1
                left = voice.advance()
                if (
                    not voice.has_bar
                    and self.done * MAX_PROGRESS_LINES // total > (self.done - 1) * MAX_PROGRESS_LINES // total
                ):
                    voice.print(f"  {self.done}/{total} batches  {left}")
        except KeyboardInterrupt:
            voice.print(f"{self.done} of {total} batches are kept in {self.path}; the same command continues.", True)
            raise


def _differing_entries(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    old, new = ({**identity, **identity.get("settings", {}), "settings": None} for identity in (before, now))
    return [name for name, value in new.items() if name not in old or old[name] != value]
