"""`cory train --max-failures`: a learner is killed, and the run ends as if nothing had happened."""

from __future__ import annotations

import pytest

from benchmarks.nodes import LEARNER, kill, named, wait_until
from tests.cluster.conftest import PATIENCE, Run, assert_as_undisturbed


@pytest.mark.slow
def test_a_learner_that_is_killed_costs_no_update(ray_session: None, run: Run) -> None:
    process = run.start(*run.words, "num_runners=0", "num_learners=1", "--max-failures", "1")
    try:
        run.hold_after(5)
        learners = named(LEARNER)
        assert len(learners) == 1
        kill(*learners)
        run.hold.unlink()
        wait_until(lambda: process.poll() is not None, 2 * PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 0, run.said
    assert "Failure 1 of at most 1: A learner's process died." in run.said
    assert "Going on after update 4." in run.said
    assert_as_undisturbed(run)
