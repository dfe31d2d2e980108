"""`cory train --max-failures`: a learner is killed or hangs, and the run ends as if undisturbed."""

from __future__ import annotations

import signal

import pytest

from benchmarks.nodes import LEARNER, named, wait_until
from tests.cluster.conftest import WAIT_SECONDS, Run, assert_as_undisturbed

SINGLE, MESH = ("num_learners=1",), ("num_policies=1", "shards_per_policy=2", "num_learners=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("learners", "stop_signal", "message"),
    [
        (SINGLE, signal.SIGKILL, "A learner's process died."),
        (SINGLE, signal.SIGSTOP, "1 of 1 learners timed out after 30 s."),
        (MESH, signal.SIGKILL, "A learner's process died."),
        (MESH, signal.SIGSTOP, "learners timed out after 30 s."),
    ],
)
def test_losing_a_learner_loses_no_update(
    ray_session: None, run: Run, learners: tuple[str, ...], stop_signal: signal.Signals, message: str
) -> None:
    words = ("num_runners=0", *learners, "learner_timeout=30", "--max-failures", "1")
    process = run.start(*run.words, *words)
    try:
        run.hold_after(5)
        processes = named(LEARNER)
        assert len(processes) == (2 if learners == MESH else 1)
        processes[-1].send_signal(stop_signal)
        run.hold.unlink()
        wait_until(lambda: process.poll() is not None, 2 * WAIT_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, run.output_text
    assert "Failure 1 of at most 1: " in run.output_text and message in run.output_text
    assert "Resuming after update 4." in run.output_text
    assert_as_undisturbed(run, 1e-5 if learners == SINGLE else 1e-3)
    assert not named(LEARNER)
