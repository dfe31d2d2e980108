"""The runs of a folder or a storage: how each stands, in a line."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from launch.console.errors import CommandError
from launch.run_folder.layout import CONFIG
from launch.run_folder.run import Run
from launch.run_folder.status import read_status
from launch.run_folder.storage import Storage, is_uri

UNREADABLE = "unreadable"


class ListedRun(NamedTuple):
    """One run."""

    run: str
    """Its folder or URI."""
    state: str
    """Of `launch.run_folder.status`; `unreadable`."""
    process: str | None = None
    """What trains it, as `123 on host`."""
    task: str | None = None
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


def list_runs(place: str) -> list[ListedRun]:
    """Returns the runs below a folder or in storage, the one last written to last.

    Raises:
        CommandError: there is no such folder or storage.
        StorageError: storage cannot be read.
    """
    if is_uri(place):
        storage = Storage(place)
        places = [storage.uri_of(name) for name in _topmost(storage.files())]
    else:
        folder = Path(place)
        if not folder.is_dir():
            raise CommandError(
                f"{place} {'is a file' if folder.exists() else 'does not exist'}. Name a folder of runs."
            )
        files = [file.relative_to(folder).as_posix() for file in folder.rglob(CONFIG) if Run(file.parent).exists()]
        places = [str(folder / name) for name in _topmost(files)]
    return sorted(map(_list_run, places), key=lambda run: (run.written or 0.0, run.run))


def _topmost(names: Iterable[str]) -> list[str]:
    """Returns the folders among files' names that hold settings, but for those in one another, which a run has too."""
    folders: list[str] = []
    for folder in sorted({name.removesuffix(CONFIG) for name in names if f"/{name}".endswith(f"/{CONFIG}")}, key=len):
        if not any(folder.startswith(outer) for outer in folders):
            folders.append(folder)
    return [folder.rstrip("/") for folder in folders]


def _list_run(place: str) -> ListedRun:
    try:
        status = read_status(place)
    except CommandError as error:
        return ListedRun(place, UNREADABLE, problem=str(error))
    best_update, best = status.best or (None, None)
    return ListedRun(
        run=place,
        state=status.state,
        process=status.process,
        task=status.settings.task,
        update=status.update,
        updates=status.settings.num_updates,
        best=best,
        best_update=best_update,
        written=status.written,
    )
