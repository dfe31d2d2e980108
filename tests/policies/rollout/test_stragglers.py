"""A runner that hangs."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.policies.conftest import MakeCory
from tests.policies.rollout.test_runners import response_texts


@pytest.mark.slow
def test_a_runner_that_hangs_is_replaced_and_its_queries_are_not_lost(make_cory: MakeCory) -> None:
    settings = {
        "queries_per_update": 4,
        "minibatch_size": 4,
        "exchange_period": 1,
        "reward": "tests.policies.sample_rewards:longer",
    }
    settings |= {"generation_timeout": 8.0, "reward_timeout": 10.0}
    reference, faulty = make_cory(num_runners=0, **settings), make_cory(num_runners=2, **settings)
    expected = [reference.train()["cory"] for _ in range(3)]
    reports = [faulty.train()["cory"]]
    pids = faulty.env_runner_group.foreach_env_runner(lambda runner: os.getpid(), local_env_runner=False)
    os.kill(pids[0], signal.SIGSTOP)
    reports.append(faulty.train()["cory"])
    started = time.monotonic()
    reports.append(faulty.train()["cory"])
    assert time.monotonic() - started < faulty.runners.rollout_timeout  # the hanging runner delays only one update
    for one, other in zip(expected, reports, strict=True):
        assert response_texts(one) == response_texts(other)
        assert one["roles"] == other["roles"]
