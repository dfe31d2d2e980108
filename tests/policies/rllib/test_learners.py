"""Failures of learners (write errors, hangs, crashes) are reported to the caller."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from policies.rllib.learners import LearnerError, _begin_save
from tests.policies.conftest import MakeCory


def test_failed_saves_and_timeouts_of_learners_raise_errors(make_cory: MakeCory, tmp_path: Path) -> None:
    algorithm = make_cory(num_learners=1, learner_timeout=15)
    blocked = tmp_path / "blocked"
    (blocked / "learner_group").mkdir(parents=True)
    (blocked / "learner_group" / "learner").touch()
    with pytest.raises(OSError, match="learner"):
        algorithm.save_to_path(blocked)
    algorithm.save_to_path(tmp_path / "complete")
    pid = algorithm.learners.call_first(lambda learner: os.getpid())
    os.kill(pid, signal.SIGSTOP)
    assert algorithm.learners.timeout == 15
    algorithm.learners.timeout = 2.0
    with pytest.raises(LearnerError, match="1 of 1 learners timed out after 2 s"):
        algorithm.learners.call_all(lambda learner: None)
    save, weights = lambda: algorithm.save_to_path(tmp_path / "lost"), lambda: algorithm.weights("llm_1")
    for call in (save, weights, algorithm.train):
        with pytest.raises(LearnerError, match="A learner's process died"):
            call()
    assert algorithm.updates == 0


@pytest.mark.slow
def test_an_error_of_one_learner_is_raised_although_the_others_wait_for_it(make_cory: MakeCory) -> None:
    learners = make_cory(num_learners=2, learner_timeout=60).learners

    def fails_alone(learner: object) -> None:
        if torch.distributed.get_rank() == 0:
            raise MemoryError("one learner's batch was too large")
        torch.distributed.all_reduce(torch.zeros(1))

    with pytest.raises(MemoryError, match="too large"):
        learners.call_all(fails_alone)
    with pytest.raises(LearnerError, match="A learner's process died"):  # the other was killed in its all-reduce
        learners.call_all(lambda learner: None)


def test_learners_reject_remote_file_systems_and_partial_restores(make_cory: MakeCory, tmp_path: Path) -> None:
    learners = make_cory().learners
    with pytest.raises(ValueError, match="Learners cannot write to mock"):
        learners.save_to_path("elsewhere", filesystem=SimpleNamespace(type_name="mock"))
    with pytest.raises(ValueError, match="Cannot restore only learner/optimizer of the learners"):
        learners.restore_from_path(tmp_path, component="learner/optimizer")


def test_a_save_on_another_machine_that_fails_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk:
        def begin_save(self, folder: str) -> None:
            (Path(folder) / "half").touch()
            raise OSError("No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OSError, match="No space left"):
        _begin_save(FullDisk(), tmp_path / "not-visible-here" / "marker")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
