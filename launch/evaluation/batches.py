"""Resumable work in batches: each result is saved at once, so a killed command continues from there."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from launch.console import output
from launch.console.errors import CommandError, make_folder
from launch.console.interrupts import Interrupts
from launch.display.terminal import ProgressPrinter
from launch.run_folder.journal import Journal
from launch.run_folder.locks import lock_folder
from launch.run_folder.storage import check_location

MAX_PROGRESS_LINES = 20
"""Maximum number of progress lines if there is no bar."""
T = TypeVar("T")


class Batches(Generic[T]):
    """A JSON Lines file with the identity of the work, `{"batch": -1, "identity": ...}`, and a line per batch."""

    def __init__(self, path: Path, identity: Mapping[str, Any], work: Sequence[T], *, restart: bool = False) -> None:
        """Creates the file, or continues an existing one.

        Args:
            path: The file, which only this process may write.
            identity: Everything that the results depend on, as JSON; entries of `settings` are compared individually.
            restart: Replace the file if it contains other work.
        """
        self.work = work
        self.done = 0
        self._journal = Journal(path, number="batch")
        if lines := self._journal.read():
            differing = _differing_entries(lines[0].get("identity", {}), json.loads(json.dumps(identity)))
            if not differing:
                self.done = lines[-1]["batch"] + 1
                self._journal.cut_after(self.done - 1)  # drop a partial line of a killed process
                return
            if not restart:
                raise CommandError(
                    f"{path} contains other work: different {', '.join(differing)}. Choose another location with --out."
                )
        path.unlink(missing_ok=True)
        self._journal.append({"batch": -1, "identity": identity})

    @property
    def path(self) -> Path:
        """The file."""
        return self._journal.path

    @property
    def results(self) -> list[dict[str, Any]]:
        """The results of the completed batches, in order."""
        return self._journal.read()[1:]

    def run(self, process_batch: Callable[[T], Mapping[str, object]], progress: ProgressPrinter) -> None:
        """Processes the remaining batches."""
        total = len(self.work)
        progress.start_clock()
        try:
            for batch in self.work[self.done :]:
                self._journal.append({"batch": self.done, **process_batch(batch)})
                self.done += 1
                left = progress.advance()
                if (
                    not progress.has_bar
                    and self.done * MAX_PROGRESS_LINES // total > (self.done - 1) * MAX_PROGRESS_LINES // total
                ):
                    progress.print(f"  {self.done}/{total} batches  {left}")
        except KeyboardInterrupt:
            progress.print(
                f"{self.done} of {total} batches are saved in {self.path}. Repeat the command to continue.", True
            )
            raise


@contextlib.contextmanager
def open_batches(
    path: Path, kind: str, identity: Mapping[str, Any], work: Sequence[T], *, quiet: bool, debug: bool
) -> Iterator[tuple[Batches[T], ProgressPrinter]]:
    """Locks a folder and opens its `responses.jsonl`, to start work or to continue it."""
    check_location(str(path), kind)
    make_folder(path)
    responses = path / "responses.jsonl"
    if not responses.exists() and any(not entry.name.startswith(".") for entry in path.iterdir()):
        raise CommandError(f"{path} is not empty. Empty it, or choose another folder with --out.")
    with lock_folder(path):
        batches = Batches(responses, identity, work)
        progress = ProgressPrinter(output.dup_stdout(), len(work), done=batches.done, quiet=quiet, bar=not debug)
        progress.print(f"Folder: {path}" + (f" ({batches.done} of {len(work)} batches done)" * bool(batches.done)))
        yield batches, progress


@contextlib.contextmanager
def show_work(progress: ProgressPrinter, log: Path, *, debug: bool) -> Iterator[Interrupts]:
    """Shows the progress of work; libraries print to `log`, or with `debug` to the terminal. Signals interrupt it."""
    with contextlib.ExitStack() as stack:
        if not debug:
            stack.enter_context(output.redirect_output(log))
        stack.enter_context(output.forward_warnings(lambda text: progress.print(text, True)))
        stack.enter_context(progress)
        yield stack.enter_context(Interrupts(lambda: None))


def _differing_entries(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the names of the entries that differ, including those of `settings`."""
    old, new = ({**identity, **identity.get("settings", {}), "settings": None} for identity in (before, now))
    return [name for name, value in new.items() if name not in old or old[name] != value]
