"""The runs of a folder or a storage, and the trials of its searches: how each stands, in a line."""

import csv
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from launch.console.errors import CommandError
from launch.experiments import outcome
from launch.experiments.search import ORIGIN, REPORTS, RESULTS, SEARCH, Search, read_reports
from launch.experiments.space import METRIC, TIME
from launch.run_folder.layout import CONFIG, FROM_PYTHON
from launch.run_folder.locks import lock_holder
from launch.run_folder.records import highest
from launch.run_folder.run import Run
from launch.run_folder.status import COLLAPSED, CRASHED, ENDED, STOPPED, TRAINING, read_run, read_status
from launch.run_folder.storage import Storage, is_uri
from policies.settings.files import DEFAULT_PRESET, presets

UNREADABLE = "unreadable"
_OF_TRIAL = {outcome.DONE: ENDED, outcome.COLLAPSED: COLLAPSED, outcome.UNFINISHED: STOPPED}


class Listed(NamedTuple):
    """One run, or one trial of a search."""

    run: str
    """Its folder or URI; a trial's folder."""
    kind: str
    """`run` or `trial`."""
    state: str
    """Of `launch.run_folder.status`; of a trial also `stopped early` and `failed`; `unreadable`."""
    process: str | None = None
    """What trains it, as `123 on host`."""
    task: str | None = None
    preset: str | None = None
    """That it was made from, or else its file of settings; None of a run from Python."""
    update: int | None = None
    updates: int | None = None
    """Those that are done, and that there are to be."""
    best: float | None = None
    """The highest held-out combined reward, as `select_by` says."""
    best_update: int | None = None
    written: float | None = None
    """When the last update was recorded, in seconds since 1970."""
    problem: str | None = None
    """Why it cannot be read."""


def listed(place: str) -> list[Listed]:
    """Returns the runs below a folder or in storage, the one last written to last.

    Raises:
        CommandError: there is no such folder or storage.
        StorageError: storage cannot be read.
    """
    if is_uri(place):
        storage = Storage(place)
        found = [_run(storage.uri_of(name)) for name in _topmost(storage.files())]
    else:
        folder = Path(place)
        if not folder.is_dir():
            raise CommandError(
                f"{place} {'is a file' if folder.exists() else 'does not exist'}. Name a folder of runs."
            )
        found = list(_below(folder))
    return sorted(found, key=lambda each: (each.written or 0.0, each.run))


def _topmost(names: Iterable[str]) -> list[str]:
    """Returns the folders among files' names that hold settings, but for those in one another, which a run has too."""
    found: list[str] = []
    for folder in sorted({name.removesuffix(CONFIG) for name in names if f"/{name}".endswith(f"/{CONFIG}")}, key=len):
        if not any(folder.startswith(outer) for outer in found):
            found.append(folder)
    return [folder.rstrip("/") for folder in found]


def _below(folder: Path) -> Iterator[Listed]:
    for path, folders, files in os.walk(folder):
        here = Path(path)
        if CONFIG in files and Run(here).exists():
            folders.clear()
            yield _run(path)
        elif SEARCH in files and (here / SEARCH).read_bytes().startswith(ORIGIN.encode()):
            folders.clear()
            yield from _trials(here)
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def _run(place: str) -> Listed:
    try:
        seen = read_status(place)
        command = (read_run(place).read(CONFIG) or b"").decode().partition("\n")[0]
    except CommandError as error:
        return Listed(place, "run", UNREADABLE, problem=str(error))
    best_update, best = seen.best or (None, None)
    return Listed(
        run=place,
        kind="run",
        state=seen.state,
        process=seen.process,
        task=seen.settings.task,
        preset=preset_of(command),
        update=seen.update,
        updates=seen.settings.updates,
        best=best,
        best_update=best_update,
        written=seen.written,
    )


def _trials(folder: Path) -> Iterator[Listed]:
    try:
        search, reports, ends = Search.read(folder), read_reports(folder), _ends(folder / RESULTS)
    except CommandError as error:
        yield Listed(str(folder), "trial", UNREADABLE, problem=str(error))
        return
    process = lock_holder(folder)
    command = (folder / SEARCH).read_text(encoding="utf-8").partition("\n")[0]
    for name in sorted({report["trial"] for report in reports} | set(ends)):
        own = {report[TIME]: report[METRIC] for report in reports if report["trial"] == name}
        done = max(own, default=0)
        best_update, best = highest(own) or (None, None)
        state = ends.get(name, CRASHED)
        if done >= search.settings.updates:
            state = ENDED
        elif process and state in (STOPPED, CRASHED, outcome.FAILED):  # those that a search goes on with
            state = TRAINING
        file = folder / name / "result.json"
        yield Listed(
            run=str(folder / name),
            kind="trial",
            state=state,
            process=process if state == TRAINING else None,
            task=search.settings.task,
            preset=preset_of(command),
            update=done,
            updates=search.settings.updates,
            best=best,
            best_update=best_update,
            written=(file if file.exists() else folder / (REPORTS if reports else SEARCH)).stat().st_mtime,
        )


def _ends(file: Path) -> dict[str, str]:
    """Returns how trials ended, by what a search that ended or was stopped has written."""
    if not file.exists():
        return {}
    with file.open(encoding="utf-8", newline="") as lines:
        return {row["trial"]: _OF_TRIAL.get(row["status"], row["status"]) for row in csv.DictReader(lines)}


def preset_of(command: str) -> str | None:
    """Returns the preset that a command names, or else its first file of settings, or else the default preset.

    None of a run from Python, which does not tell.
    """
    if FROM_PYTHON in command:
        return None
    words = command.split()
    known = presets()
    files = [word for word in words if word.endswith((".yaml", ".yml")) and "=" not in word]
    return next((word for word in words if word in known), files[0] if files else DEFAULT_PRESET)
