"""Asynchronous checkpoints: written during training and published when complete."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import fsspec.implementations.local  # type: ignore[import-untyped]
import pytest
from pyarrow.fs import FSSpecHandler, LocalFileSystem, PyFileSystem

from launch.run_folder import manifest
from launch.run_folder.checkpoints import checkpoint_name
from launch.run_folder.run import Run
from launch.run_folder.storage import Storage
from launch.run_folder.stored_run import StoredRun
from launch.training.saving import CheckpointWriter
from policies.cory import Cory
from policies.learning import stored_policy
from policies.models.weights import checksum
from policies.rllib.token_ppo_learner import TokenPPOLearner
from tests.launch.conftest import record_test_run
from tests.policies.conftest import MakeCory, make_cory, ray_session

__all__ = ["make_cory", "ray_session"]


class Disk:
    """A fake disk for learners, with controllable speed and free space."""

    def __init__(self) -> None:
        self.ready, self.full = threading.Event(), False
        self._save = stored_policy.save

    def save(self, *args: object) -> None:
        assert self.ready.wait(60)
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._save(*args)  # type: ignore[arg-type]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Makes learners copy weights before writing, as on a GPU."""
    disk = Disk()
    monkeypatch.setattr(TokenPPOLearner, "_saves_in_background", True)
    monkeypatch.setattr(stored_policy, "save", disk.save)
    return disk


@pytest.fixture
def algorithm(make_cory: MakeCory) -> Cory:
    return make_cory(lr=1e-3, num_agents=1, eval_every=100)


@pytest.fixture
def run(algorithm: Cory, tmp_path: Path) -> Run:
    return record_test_run(tmp_path / "run", algorithm.settings, updates=range(1))


def names(run: Run) -> list[str]:
    """Returns the names of checkpoints, complete or not."""
    return sorted(entry.name for entry in run.checkpoints.folder.iterdir() if "update" in entry.name)


def test_training_continues_during_a_save_and_checkpoints_are_published_when_complete(
    algorithm: Cory, run: Run, disk: Disk, make_cory: MakeCory
) -> None:
    with CheckpointWriter(run, 2, pytest.fail) as writer:
        algorithm.train()
        writer.start(algorithm)
        writer.start(algorithm)  # no effect: already pending
        algorithm.train()
        writer.poll()
        assert names(run) == [".unfinished-update_000001"]
        disk.ready.set()
        writer.start(algorithm)  # waits for the first
        assert "update_000001" in names(run)
        algorithm.train()
    assert names(run) == ["update_000001", "update_000002"]
    resumed = make_cory(lr=1e-3, num_agents=1, eval_every=100)
    for update in (1, 2):
        checkpoint = run.checkpoints.path_of(update)
        assert manifest.verify(checkpoint) is None
        resumed.restore_from_path(str(checkpoint))
        while resumed.updates < 3:
            resumed.train()
        assert checksum(resumed.weights("llm_1")) == checksum(algorithm.weights("llm_1"))


def test_a_full_disk_is_reported_and_keeps_earlier_checkpoints(algorithm: Cory, run: Run, disk: Disk) -> None:
    disk.ready.set()
    with pytest.raises(OSError) as raised, CheckpointWriter(run, 2, pytest.fail) as writer:
        writer.start(algorithm)
        writer.finish()
        algorithm.train()
        disk.full = True
        disk.ready.clear()
        writer.start(algorithm)
        assert names(run) == [".unfinished-update_000001", "update_000000"]
        disk.ready.set()
        algorithm.train()
        writer.finish()
    assert raised.value.errno == errno.ENOSPC and str(raised.value.filename).endswith("update_000001")
    assert names(run) == ["update_000000"] and manifest.verify(run.checkpoints.path_of(0)) is None


@pytest.mark.parametrize(("error", "checkpoints"), [(RuntimeError, ["update_000000"]), (KeyboardInterrupt, [])])
def test_a_pending_checkpoint_is_published_after_an_error_but_not_after_an_abort(
    algorithm: Cory, run: Run, disk: Disk, error: type[BaseException], checkpoints: list[str]
) -> None:
    with pytest.raises(error), CheckpointWriter(run, 2, pytest.fail) as writer:
        writer.start(algorithm)
        if error is RuntimeError:
            disk.ready.set()
        raise error
    assert names(run) == checkpoints
    disk.ready.set()


class SlowStorage(fsspec.implementations.local.LocalFileSystem):
    """Storage that is written only when `ready` is set, and may be full."""

    cachable, protocol = False, "slow"

    def __init__(self) -> None:
        super().__init__()
        self.ready, self.started, self.full = threading.Event(), threading.Event(), False

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode:
            self.started.set()
            assert self.ready.wait(60)
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().open(path, mode, **options)


@pytest.fixture
def slow() -> SlowStorage:
    return SlowStorage()


@pytest.fixture
def stored_run(slow: SlowStorage, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoredRun:
    """The run, in slow storage."""
    monkeypatch.setattr(Storage, "cache", lambda self: run.path)
    return StoredRun(Storage("test://slow", (PyFileSystem(FSSpecHandler(slow)), str(tmp_path / "slow"))))


def stored(tmp_path: Path) -> list[int]:
    """Returns the updates of the checkpoints in storage, each checked."""
    storage = Storage("test://slow", (LocalFileSystem(), str(tmp_path / "slow")))
    assert all(manifest.verify(tmp_path / "slow/checkpoints" / checkpoint_name(k)) is None for k in storage.updates())
    return storage.updates()


def test_training_continues_during_an_upload_and_the_next_one_has_what_is_new(
    algorithm: Cory, stored_run: StoredRun, slow: SlowStorage, tmp_path: Path
) -> None:
    with CheckpointWriter(stored_run, 1, pytest.fail) as writer:
        slow.ready.set()
        writer.start(algorithm)
        writer.finish()
        assert stored(tmp_path) == [0]  # the best checkpoint, which stays
        slow.ready.clear()
        slow.started.clear()
        for _ in range(3):
            algorithm.train()
            writer.start(algorithm)
            assert slow.started.wait(60)  # the first upload, which does not end
            writer.poll()
        # The checkpoint that is being uploaded is not removed.
        assert names(stored_run) == ["update_000000", "update_000001", "update_000003"] and stored(tmp_path) == [0]
        slow.ready.set()
    assert names(stored_run) == ["update_000000", "update_000003"]
    assert stored(tmp_path) == [0, 1, 3]  # keep_checkpoints=2, and the best


def test_a_failed_upload_is_reported_and_the_next_save_uploads_what_is_missing(
    algorithm: Cory, stored_run: StoredRun, slow: SlowStorage, tmp_path: Path
) -> None:
    warnings: list[str] = []
    slow.full = True
    with CheckpointWriter(stored_run, 2, warnings.append) as writer:
        writer.start(algorithm)
        assert slow.started.wait(60) and not warnings
        slow.ready.set()
        while not warnings:
            writer.poll()
        slow.full = False
        algorithm.train()
        writer.start(algorithm)
    (warning,) = warnings
    assert "test://slow cannot be written" in warning and "the next save uploads the missing files." in warning
    assert stored(tmp_path) == [0, 1]


def test_an_abort_waits_for_the_file_that_is_being_uploaded_and_no_longer(
    algorithm: Cory, stored_run: StoredRun, slow: SlowStorage, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(stored_run, 2, pytest.fail) as writer:
        slow.ready = writer._aborted  # the file can be written as soon as the writer knows of the abort
        writer.start(algorithm)
        assert slow.started.wait(60)
        raise KeyboardInterrupt
    assert stored(tmp_path) == [] and names(stored_run) == ["update_000000"]
