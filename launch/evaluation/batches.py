"""Work in batches with its progress, and the folder of its results, which are written when all batches are done."""

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from launch.console import output
from launch.console.errors import CommandError, make_folder
from launch.console.interrupts import Interrupts
from launch.display.terminal import ProgressPrinter
from launch.run_folder.layout import LOG
from launch.run_folder.locks import lock_folder
from launch.run_folder.records import to_json
from launch.run_folder.storage import check_location
from policies.files import atomic_write

RESPONSES = "responses.jsonl"
MAX_PROGRESS_LINES = 20
"""Maximum number of progress lines if there is no bar."""
T = TypeVar("T")


def show_progress(results: Iterable[T], total: int, progress: ProgressPrinter) -> Iterator[T]:
    """Yields the result of each batch, and counts it."""
    for done, result in enumerate(results, 1):
        left = progress.advance()
        if not progress.has_bar and done * MAX_PROGRESS_LINES // total > (done - 1) * MAX_PROGRESS_LINES // total:
            progress.print(f"  {done}/{total} batches  {left}")
        yield result


@contextlib.contextmanager
def open_results(
    path: Path, kind: str, batches: int, *, quiet: bool, debug: bool
) -> Iterator[tuple[ProgressPrinter, Interrupts]]:
    """Locks an empty folder for results, shows the progress of the work, and lets signals interrupt it.

    Libraries print to `log.txt` in the folder, or with `debug` to the terminal. A killed process leaves only this log,
    and perhaps `responses.jsonl`, which is written before the result.
    """
    check_location(str(path), kind)
    make_folder(path)
    if {entry.name for entry in path.iterdir() if not entry.name.startswith(".")} - {LOG, RESPONSES}:
        raise CommandError(f"{path} is not empty. Empty it, or choose another folder with --out.")
    with lock_folder(path) as stack:
        progress = ProgressPrinter(output.dup_stdout(), batches, quiet=quiet, bar=not debug)
        progress.print(f"Folder: {path}")
        if not debug:
            stack.enter_context(output.redirect_output(path / LOG))
        stack.enter_context(output.forward_warnings(lambda text: progress.print(text, True)))
        stack.enter_context(progress)
        yield progress, stack.enter_context(Interrupts(lambda: None))


def write_lines(file: Path, records: Iterable[object]) -> None:
    """Writes a JSON Lines file atomically."""
    atomic_write(file, _to_lines(records))


def append_lines(file: Path, records: Iterable[object]) -> None:
    """Appends to a JSON Lines file, so that what a command was paid for outlives its failure."""
    with file.open("a", encoding="utf-8") as stream:
        stream.write(_to_lines(records))


def _to_lines(records: Iterable[object]) -> str:
    return "".join(json.dumps(to_json(record), ensure_ascii=False) + "\n" for record in records)
