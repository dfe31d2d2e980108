"""The runs in a folder or storage, with the status of each."""

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
    """A run and its status."""

    run: str
    """Its folder or URI."""
    state: str
    """A state of `launch.run_folder.status`, or `unreadable`."""
    process: str | None = None
    """The process that trains it, as `123 on host`."""
    task: str | None = None
    update: int | None = None
    updates: int | None = None
    """Completed updates, and the total number."""
    best: float | None = None
    """The highest held-out combined reward of the evaluations that `select_by` chooses from."""
    best_update: int | None = None
    written: float | None = None
    """Time of the last recorded update, in seconds since 1970."""
    problem: str | None = None
    """Why the run cannot be read."""


def list_runs(location: str) -> list[ListedRun]:
    """Returns the runs below a folder or in storage, sorted by the time of their last update.

    Raises:
        CommandError: The folder or storage does not exist.
        StorageError: Storage cannot be read.
    """
    if is_uri(location):
        storage = Storage(location)
        run_locations = [storage.uri_of(name) for name in _topmost(storage.files())]
    else:
        folder = Path(location)
        if not folder.is_dir():
            raise CommandError(
                f"{location} {'is a file' if folder.exists() else 'does not exist'}. Pass a folder of runs."
            )
        files = [file.relative_to(folder).as_posix() for file in folder.rglob(CONFIG) if Run(file.parent).exists()]
        run_locations = [str(folder / name) for name in _topmost(files)]
    return sorted(map(_list_run, run_locations), key=lambda run: (run.written or 0.0, run.run))


def _topmost(names: Iterable[str]) -> list[str]:
    """Returns the outermost folders with a config file; a run's own folder may contain more of them."""
    folders: list[str] = []
    for folder in sorted({name.removesuffix(CONFIG) for name in names if f"/{name}".endswith(f"/{CONFIG}")}, key=len):
        if not any(folder.startswith(outer) for outer in folders):
            folders.append(folder)
    return [folder.rstrip("/") for folder in folders]


def _list_run(location: str) -> ListedRun:
    try:
        status = read_status(location)
    except CommandError as error:
        return ListedRun(location, UNREADABLE, problem=str(error))
    best_update, best = status.best or (None, None)
    return ListedRun(
        run=location,
        state=status.state,
        process=status.process,
        task=status.settings.task,
        update=status.update,
        updates=status.settings.num_updates,
        best=best,
        best_update=best_update,
        written=status.written,
    )
