"""Chains at their own pace: the same chains as in lockstep, whenever their responses end."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.generation.generator import Generator, OnFinished, Request
from policies.rllib.token_batch import LOGPROBS, TASK_REWARD
from policies.rollout.prompt_sampling import PromptRef
from tests.policies.rollout.test_chain_runner import make_runner, play

DEALS = [PromptRef(query % 4, query // 4) for query in range(8)]
GAMES: list[tuple[dict[str, Any], int, list[int]]] = [
    ({"num_agents": 2}, 1, [16]),
    ({"num_agents": 4, "num_policies": 2}, 1, [32]),
    ({"num_agents": 4, "weights": "lora", "observed": "best"}, 1, [16, 8, 8]),
    ({"num_agents": 2, "num_policies": 1}, 3, [8, 24]),
    ({"num_agents": 3, "weights": "lora", "observed": "best"}, 2, [8, 16, 16]),
]
"""Settings, siblings, and the samples of each call of the reward."""


class OneByOne:
    """A backend in which responses end one at a time, each time the one that is chosen."""

    def __init__(self, generator: Generator, choose: Callable[[int], int]) -> None:
        self.generate, self.close = generator.generate, generator.close
        self.choose = choose
        self.order: list[int] = []

    def run_requests(self, requests: Sequence[Request], on_finished: OnFinished) -> None:
        waiting = list(requests)
        while waiting:
            request = waiting.pop(self.choose(len(waiting)))
            self.order.append(request.key)
            ended = self.generate([request.prompt], request.policy_id, request.sampling)
            waiting += on_finished([(request.key, response) for response in ended])


@pytest.mark.parametrize(("settings", "siblings", "calls"), GAMES)
def test_chains_and_reward_calls_are_the_same_in_whatever_order_responses_end(
    ray_session: None, tmp_path: Path, settings: dict[str, Any], siblings: int, calls: list[int]
) -> None:
    log = tmp_path / "calls"
    reward = f"tests.cory_env.sample_rewards:logged_length?log={log}"
    runner: Any = make_runner(stop="o", reward=reward, **settings)
    expected = play(runner, DEALS, num_siblings=siblings)
    assert len({len(agent.actions[0]["tokens"]) for each in expected.episodes for agent in agents(each)}) > 2
    runner.generator = OneByOne(runner.generator, random.Random(0).randrange)
    found = play(runner, DEALS, num_siblings=siblings)
    assert runner.generator.order != sorted(runner.generator.order)
    runner.stop()
    assert [int(size) for size in log.read_text().split()] == calls * 2
    assert (found.prompt_refs, found.samples) == (expected.prompt_refs, expected.samples)
    assert found.counters["tokens"] == expected.counters["tokens"]
    for one, other in zip(found.episodes, expected.episodes, strict=True):
        for mine, theirs in zip(agents(one), agents(other), strict=True):
            assert mine.actions[0] == theirs.actions[0] and mine.rewards[0] == theirs.rewards[0]
            assert mine.extra_model_outputs[TASK_REWARD][0] == theirs.extra_model_outputs[TASK_REWARD][0]
            here, there = (agent.extra_model_outputs[LOGPROBS][0] for agent in (mine, theirs))
            np.testing.assert_allclose(here, there, atol=1e-4)


def agents(episode: Any) -> list[Any]:
    return list(episode.agent_episodes.values())


def test_a_chain_may_be_over_before_another_has_begun(ray_session: None) -> None:
    runner: Any = make_runner(num_agents=3)
    runner.generator = OneByOne(runner.generator, lambda waiting: waiting - 1)
    play(runner, DEALS)
    assert runner.generator.order == [place for place in reversed(range(8)) for _ in range(3)]
    runner.stop()
