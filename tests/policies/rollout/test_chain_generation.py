"""Continuous batching: the same chains as in lockstep, whenever their responses finish."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.generation.generator import Generator, IsReady, OnFinished, Request
from policies.rllib.token_batch import LOGPROBS, TASK_REWARD
from policies.rollout.prompt_sampling import PromptRef
from tests.policies.rollout.test_chain_runner import make_runner, sample_chains

PROMPT_REFS = [PromptRef(query % 4, query // 4) for query in range(8)]
SCHEDULER_CASES: list[tuple[dict[str, Any], list[int]]] = [
    ({"num_agents": 2}, [16]),
    ({"num_agents": 4, "num_policies": 2}, [32]),
]
"""Settings, and number of samples in each reward call."""


class OneByOneGenerator:
    """A backend in which responses finish one at a time, in an order that `choose` decides."""

    in_batches = True

    def __init__(self, generator: Generator, choose: Callable[[int], int]) -> None:
        self.generate, self.close = generator.generate, generator.close
        self.choose = choose
        self.order: list[int] = []

    def run_requests(
        self, requests: Sequence[Request], on_finished: OnFinished, is_ready: IsReady = lambda: False
    ) -> None:
        waiting = list(requests)
        while waiting:
            request = waiting.pop(self.choose(len(waiting)))
            self.order.append(request.key)
            responses = self.generate([request.prompt], request.policy_id, request.sampling)
            waiting += on_finished([(request.key, response) for response in responses])


STOPPING = {"stop_when": "solved", "stop_in_training": True}
SHOWN = {"observer_prompt": "{query}: {reference} ({feedback}). {query}"}
FEEDBACK_CASES: list[tuple[dict[str, Any], int]] = [
    ({"num_agents": 2, **SHOWN}, 1),
    ({"num_agents": 2, **STOPPING}, 1),
    ({"num_agents": 4, "num_policies": 2, **SHOWN, **STOPPING}, 3),
    ({"num_agents": 4, "weights": "lora", "observed": "last", **SHOWN, **STOPPING}, 3),
]
"""Settings, and number of feedback calls."""


@pytest.mark.parametrize(("settings", "calls"), FEEDBACK_CASES)
def test_feedback_calls_and_stops_do_not_depend_on_the_order_in_which_responses_finish(
    ray_session: None, tmp_path: Path, settings: dict[str, Any], calls: int
) -> None:
    log = tmp_path / "calls"
    feedback = f"tests.policies.sample_rewards:logged_feedback?log={log}&limit=12"
    runner: Any = make_runner(stop="o", feedback=feedback, **settings)
    expected = sample_chains(runner, PROMPT_REFS)
    sizes = [int(size) for size in log.read_text().split()]
    assert len(sizes) == calls and sizes[0] == len(PROMPT_REFS)
    lengths = [len(sample["responses"]) for sample in expected.samples]
    assert sizes[1:] == [sum(length > position for length in lengths) for position in range(1, calls)]
    assert len(set(lengths)) > 1 if "stop_when" in settings else set(lengths) == {settings["num_agents"]}
    for sample in expected.samples:
        for response in sample["responses"][:-1]:
            assert response["feedback"] == (
                None if len(response["text"]) >= 12 else f"{len(response['text'])} characters"
            )
    runner.generator = OneByOneGenerator(runner.generator, random.Random(0).randrange)
    rollout = sample_chains(runner, PROMPT_REFS)
    assert runner.generator.order != sorted(runner.generator.order)
    runner.stop()
    assert [int(size) for size in log.read_text().split()] == sizes * 2
    assert (rollout.prompt_refs, rollout.samples) == (expected.prompt_refs, expected.samples)
    assert rollout.counters["tokens"] == expected.counters["tokens"]


@pytest.mark.parametrize(("settings", "calls"), SCHEDULER_CASES)
def test_chains_and_reward_calls_do_not_depend_on_the_order_in_which_responses_finish(
    ray_session: None, tmp_path: Path, settings: dict[str, Any], calls: list[int]
) -> None:
    log = tmp_path / "calls"
    reward = f"tests.cory_env.sample_rewards:logged_length?log={log}"
    runner: Any = make_runner(stop="o", reward=reward, **settings)
    expected = sample_chains(runner, PROMPT_REFS)
    assert (
        len({len(agent.actions[0]["tokens"]) for episode in expected.episodes for agent in agent_episodes(episode)}) > 2
    )
    runner.generator = OneByOneGenerator(runner.generator, random.Random(0).randrange)
    rollout = sample_chains(runner, PROMPT_REFS)
    assert runner.generator.order != sorted(runner.generator.order)
    runner.stop()
    assert [int(size) for size in log.read_text().split()] == calls * 2
    assert (rollout.prompt_refs, rollout.samples) == (expected.prompt_refs, expected.samples)
    assert rollout.counters["tokens"] == expected.counters["tokens"]
    for episode, expected_episode in zip(rollout.episodes, expected.episodes, strict=True):
        for one, other in zip(agent_episodes(episode), agent_episodes(expected_episode), strict=True):
            assert one.actions[0] == other.actions[0] and one.rewards[0] == other.rewards[0]
            assert one.extra_model_outputs[TASK_REWARD][0] == other.extra_model_outputs[TASK_REWARD][0]
            logprobs, expected_logprobs = (agent.extra_model_outputs[LOGPROBS][0] for agent in (one, other))
            np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-4)


def agent_episodes(episode: Any) -> list[Any]:
    return list(episode.agent_episodes.values())


def test_a_chain_may_finish_before_another_one_starts(ray_session: None) -> None:
    runner: Any = make_runner(num_agents=3)
    runner.generator = OneByOneGenerator(runner.generator, lambda waiting: waiting - 1)
    sample_chains(runner, PROMPT_REFS)
    assert [key // 3 for key in runner.generator.order] == [index for index in reversed(range(8)) for _ in range(3)]
    runner.stop()
