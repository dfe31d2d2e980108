"""A runner that stands still."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.policies.conftest import MakeCory
from tests.policies.rollout.test_runners import texts


@pytest.mark.slow
def test_a_runner_that_stands_still_is_given_up_replaced_and_its_queries_played(make_cory: MakeCory) -> None:
    settings = {
        "queries_per_update": 4,
        "minibatch_size": 4,
        "exchange_period": 1,
        "reward": "tests.policies.sample_rewards:longer",
    }
    settings |= {"generation_timeout": 8.0, "reward_timeout": 10.0}
    calm, shaken = make_cory(num_runners=0, **settings), make_cory(num_runners=2, **settings)
    expected = [calm.train()["cory"] for _ in range(3)]
    found = [shaken.train()["cory"]]
    pids = shaken.env_runner_group.foreach_env_runner(lambda runner: os.getpid(), local_env_runner=False)
    os.kill(pids[0], signal.SIGSTOP)
    found.append(shaken.train()["cory"])
    started = time.monotonic()
    found.append(shaken.train()["cory"])
    assert time.monotonic() - started < shaken.runners.rollout_timeout  # it is not waited for again
    for one, other in zip(expected, found, strict=True):
        assert texts(one) == texts(other)
        assert one["roles"] == other["roles"]
