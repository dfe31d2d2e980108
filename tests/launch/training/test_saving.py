"""Asynchronous checkpoints: written during training and published when complete."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from launch.run_folder import manifest
from launch.run_folder.run import Run
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
