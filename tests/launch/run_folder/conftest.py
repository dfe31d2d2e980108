"""Fixtures: runs in storage."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from launch.run_folder.stored_run import StoredRun
from tests.launch.run_folder.test_checkpoints import write_checkpoint
from tests.paper import paper_settings

SETTINGS = paper_settings(num_updates=12, keep_checkpoints=2)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache with the local folders of runs in storage."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def path(home: Path, tmp_path: Path) -> Path:
    """Folder of a run in storage."""
    return tmp_path / "storage" / "run"


@contextlib.contextmanager
def on_another_machine(folder: Path) -> Iterator[None]:
    """Context manager: uses another cache, as on another machine."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "elsewhere"))
        yield


def stored_run(path: Path, updates: int = 7, saved: Sequence[int] = (0, 6)) -> StoredRun:
    """Creates a run with checkpoints of updates 0 and 6, in storage and in its local folder."""
    run = StoredRun.create(f"file://{path}")
    run.write_settings(SETTINGS, "cory train")
    for update in range(updates):
        run.metrics_file.append({"update": update})
        if update in saved:
            run.checkpoints.save(update, write_checkpoint)
            run.upload()
    return run


def resume(path: Path) -> StoredRun:
    """Opens a run in storage and takes it over, as `cory train --resume` does."""
    run = StoredRun.open(f"file://{path}")
    run.take_over()
    return run


def contents(path: Path) -> dict[str, bytes]:
    """Returns all files below a folder, by relative path."""
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def end(run: StoredRun) -> None:
    """Ends a run whose updates are done."""
    run.finish_upload()
    run.remove_local()
