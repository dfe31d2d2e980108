"""`cory train --max-failures`: a learner is killed or stands still, and the run ends as if nothing had happened."""

from __future__ import annotations

import signal

import pytest

from benchmarks.nodes import LEARNER, named, wait_until
from tests.cluster.conftest import PATIENCE, Run, assert_as_undisturbed

ALONE, MESH = ("num_learners=1",), ("num_policies=1", "shards_per_policy=2", "num_learners=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("learners", "how", "seen"),
    [
        (ALONE, signal.SIGKILL, "A learner's process died."),
        (ALONE, signal.SIGSTOP, "1 of 1 learners gave no answer in 30 s."),
        (MESH, signal.SIGKILL, "A learner's process died."),
        (MESH, signal.SIGSTOP, "learners gave no answer in 30 s."),
    ],
)
def test_a_learner_that_is_lost_costs_no_update(
    ray_session: None, run: Run, learners: tuple[str, ...], how: signal.Signals, seen: str
) -> None:
    words = ("num_runners=0", *learners, "learner_timeout=30", "--max-failures", "1")
    process = run.start(*run.words, *words)
    try:
        run.hold_after(5)
        processes = named(LEARNER)
        assert len(processes) == (2 if learners == MESH else 1)
        processes[-1].send_signal(how)
        run.hold.unlink()
        wait_until(lambda: process.poll() is not None, 2 * PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 0, run.said
    assert "Failure 1 of at most 1: " in run.said and seen in run.said
    assert "Resuming after update 4." in run.said
    assert_as_undisturbed(run, 1e-5 if learners == ALONE else 1e-3)
    assert not named(LEARNER)
