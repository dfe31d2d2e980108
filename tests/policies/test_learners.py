"""A learner that cannot write, stands still, or is gone: whatever asked it hears of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from policies.learners import LearnerError
from tests.policies.conftest import MakeCory


def test_what_a_learner_could_not_write_or_send_is_never_taken_for_whole(make_cory: MakeCory, tmp_path: Path) -> None:
    algorithm = make_cory(num_learners=1, learner_timeout=15)
    blocked = tmp_path / "blocked"
    (blocked / "learner_group").mkdir(parents=True)
    (blocked / "learner_group" / "learner").touch()
    with pytest.raises(OSError, match="learner"):
        algorithm.save_to_path(blocked)
    algorithm.save_to_path(tmp_path / "whole")
    pid = algorithm._on_learner(lambda learner: os.getpid())
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(LearnerError, match="1 of 1 learners gave no answer in 15 s"):
        algorithm.weights("llm_1")
    for ask in (lambda: algorithm.save_to_path(tmp_path / "lost"), lambda: algorithm.weights("llm_1"), algorithm.train):
        with pytest.raises(LearnerError, match="A learner's process died"):
            ask()
    assert algorithm.updates == 0
