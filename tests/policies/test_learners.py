"""A learner that cannot write, or is gone: whatever asked it hears of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from policies.learners import LearnerError
from tests.policies.conftest import MakeCory


def test_what_a_learner_could_not_write_is_never_taken_for_a_checkpoint(make_cory: MakeCory, tmp_path: Path) -> None:
    algorithm = make_cory(num_learners=1)
    blocked = tmp_path / "blocked"
    (blocked / "learner_group").mkdir(parents=True)
    (blocked / "learner_group" / "learner").touch()
    with pytest.raises(OSError, match="learner"):
        algorithm.save_to_path(blocked)
    algorithm.save_to_path(tmp_path / "whole")
    ray.kill(algorithm.learner_group._workers[0])
    for ask in (lambda: algorithm.save_to_path(tmp_path / "lost"), lambda: algorithm.weights("llm_1"), algorithm.train):
        with pytest.raises(LearnerError, match="A learner's process died"):
            ask()
    assert algorithm.updates == 0
