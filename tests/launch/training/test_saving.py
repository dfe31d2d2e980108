"""A checkpoint is written while training goes on, and published when it is whole."""

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
from tests.launch.conftest import record
from tests.policies.conftest import MakeCory, make_cory, ray_session

__all__ = ["make_cory", "ray_session"]


class Disk:
    """Where learners write: as slow as a test wants it, and full if it says so."""

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
    """Has learners copy what they write, as on a GPU."""
    disk = Disk()
    monkeypatch.setattr(TokenPPOLearner, "_copies", True)
    monkeypatch.setattr(stored_policy, "save", disk.save)
    return disk


@pytest.fixture
def algorithm(make_cory: MakeCory) -> Cory:
    return make_cory(lr=1e-3, num_agents=1, eval_every=100)


@pytest.fixture
def run(algorithm: Cory, tmp_path: Path) -> Run:
    return record(tmp_path / "run", algorithm.settings, updates=range(1))


def names(run: Run) -> list[str]:
    """Of checkpoints, whole or not."""
    return sorted(entry.name for entry in run.checkpoints.folder.iterdir() if "update" in entry.name)


def test_training_goes_on_beside_one_checkpoint_which_is_published_when_it_is_whole(
    algorithm: Cory, run: Run, disk: Disk, make_cory: MakeCory
) -> None:
    with CheckpointWriter(run, 2, pytest.fail) as saving:
        algorithm.train()
        saving.start(algorithm)
        saving.start(algorithm)  # the same
        algorithm.train()
        saving.poll()
        assert names(run) == [".unfinished-update_000001"]
        disk.ready.set()
        saving.start(algorithm)  # never two at once
        assert "update_000001" in names(run)
        algorithm.train()
    assert names(run) == ["update_000001", "update_000002"]
    resumed = make_cory(lr=1e-3, num_agents=1, eval_every=100)
    for update in (1, 2):
        place = run.checkpoints.place(update)
        assert manifest.verify(place) is None
        resumed.restore_from_path(str(place))
        while resumed.updates < 3:
            resumed.train()
        assert checksum(resumed.weights("llm_1")) == checksum(algorithm.weights("llm_1"))


def test_a_full_disk_is_heard_of_at_the_next_look_and_leaves_the_checkpoints_before(
    algorithm: Cory, run: Run, disk: Disk
) -> None:
    disk.ready.set()
    with pytest.raises(OSError) as raised, CheckpointWriter(run, 2, pytest.fail) as saving:
        saving.start(algorithm)
        saving.finish()
        algorithm.train()
        disk.full = True
        disk.ready.clear()
        saving.start(algorithm)
        assert names(run) == [".unfinished-update_000001", "update_000000"]
        disk.ready.set()
        algorithm.train()
        saving.finish()
    assert raised.value.errno == errno.ENOSPC and str(raised.value.filename).endswith("update_000001")
    assert names(run) == ["update_000000"] and manifest.verify(run.checkpoints.place(0)) is None


@pytest.mark.parametrize(("what", "left"), [(RuntimeError, ["update_000000"]), (KeyboardInterrupt, [])])
def test_what_fails_meanwhile_loses_no_checkpoint_that_was_begun_but_an_abort_does(
    algorithm: Cory, run: Run, disk: Disk, what: type[BaseException], left: list[str]
) -> None:
    with pytest.raises(what), CheckpointWriter(run, 2, pytest.fail) as saving:
        saving.start(algorithm)
        if what is RuntimeError:
            disk.ready.set()
        raise what
    assert names(run) == left
    disk.ready.set()
