"""How queries are shared among runners, and a runner that is killed."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path

import pytest

from cory_env.rewards import RewardError
from policies.chain_runner import Deal
from policies.generator import GenerationError
from policies.language_model import ModelError
from policies.runners import split
from tests.policies.conftest import MakeCory
from tests.policies.test_language_model import deeper_than_its_weights


@pytest.mark.parametrize("runners", [1, 2, 3, 7])
def test_shares_hold_every_query_once_and_in_order(runners: int) -> None:
    deals = [Deal(query) for query in range(5)]
    shares = list(split([(0, deals)], runners))
    assert len(shares) == min(runners, 5)
    assert [deal for place, share in sorted(shares) for deal in share] == deals
    assert [place for place, _ in shares] == [share[0].query for _, share in shares]


def test_with_fewer_runners_than_open_shares_the_rest_waits() -> None:
    pending = [(0, [Deal(0), Deal(1)]), (2, [Deal(2)]), (3, [Deal(3)])]
    assert list(split(pending, 2)) == pending[:2]


def test_queries_of_a_runner_that_is_killed_are_played_all_the_same(make_cory: MakeCory) -> None:
    calm = make_cory(num_runners=1, queries=4, minibatch=4)
    shaken = make_cory(num_runners=1, queries=4, minibatch=4)
    for algorithm in (calm, shaken):
        algorithm.train()
    pids = [answer.get() for answer in shaken.env_runner_group._worker_manager.foreach_actor(lambda _: os.getpid())]
    os.kill(pids[0], signal.SIGKILL)
    expected, found = calm.train()["cory"], shaken.train()["cory"]
    assert found["samples"] == expected["samples"]
    assert found["policy"] == expected["policy"]
    assert shaken.updates == 2


def test_a_reward_that_fails_in_a_runner_reaches_the_driver_as_what_it_is(make_cory: MakeCory) -> None:
    algorithm = make_cory(num_runners=1, queries=4, minibatch=4, reward="tests.policies.sample_rewards:boom")
    with pytest.raises(RewardError, match=r"tests\.policies\.sample_rewards:boom"):
        algorithm.train()
    assert algorithm.updates == 0


def test_a_reward_that_hangs_longer_than_a_rollout_may_take_is_named_all_the_same(make_cory: MakeCory) -> None:
    hanging = {"reward": "tests.policies.sample_rewards:hang", "reward_timeout": 5.0, "generation_timeout": 8.0}
    algorithm = make_cory(num_runners=1, queries=2, minibatch=2, **hanging)
    with pytest.raises(RewardError, match=r"sample_rewards:hang failed .* it ran longer than its time limit of 5 s"):
        algorithm.train()


def test_a_runner_that_cannot_start_says_why(make_cory: MakeCory, tmp_path: Path) -> None:
    model = deeper_than_its_weights(tmp_path)
    with pytest.raises(
        ModelError, match=r"do not go with its config.json: 12 parameters are missing .* transformer\.h\.4"
    ):
        make_cory(num_runners=1, model=str(model))


def test_queries_that_end_every_runner_are_given_up(make_cory: MakeCory) -> None:
    algorithm = make_cory(num_runners=1, queries=2, minibatch=2, reward="tests.policies.sample_rewards:kill_runner")
    with pytest.raises(GenerationError, match="All runners failed 3 times in a row on the same queries"):
        algorithm.train()


def test_where_every_reward_fails_nothing_is_evaluated_and_training_stops(
    make_cory: MakeCory, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = make_cory(reward="tests.policies.sample_rewards:boom", on_reward_error="skip", queries=2, minibatch=2)
    figures = algorithm.evaluate_policies()
    assert set(figures) == {"llm_1", "llm_2", "mean"}
    assert all(math.isnan(value) for policy in figures.values() for value in policy.values())
    assert "The reward failed on all 4 held-out queries of llm_1: not evaluated." in caplog.messages
    with pytest.raises(RewardError, match="failed on every query of update 1"):
        algorithm.train()
