"""`cory train --max-failures`: a learner is killed or stands still, and the run ends as if nothing had happened."""

from __future__ import annotations

import signal

import pytest

from benchmarks.nodes import LEARNER, named, wait_until
from tests.cluster.conftest import PATIENCE, Run, assert_as_undisturbed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "seen"),
    [(signal.SIGKILL, "A learner's process died."), (signal.SIGSTOP, "1 of 1 learners gave no answer in 30 s.")],
)
def test_a_learner_that_is_lost_costs_no_update(ray_session: None, run: Run, how: signal.Signals, seen: str) -> None:
    words = ("num_runners=0", "num_learners=1", "learner_timeout=30", "--max-failures", "1")
    process = run.start(*run.words, *words)
    try:
        run.hold_after(5)
        learners = named(LEARNER)
        assert len(learners) == 1
        learners[0].send_signal(how)
        run.hold.unlink()
        wait_until(lambda: process.poll() is not None, 2 * PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 0, run.said
    assert f"Failure 1 of at most 1: {seen}" in run.said
    assert "Going on after update 4." in run.said
    assert_as_undisturbed(run)
