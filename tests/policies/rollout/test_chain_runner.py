"""The runner's episodes, compared with those of the PettingZoo environment."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from ray.rllib.env.wrappers.pettingzoo_env import PettingZooEnv

from cory_env import cory_v0
from policies.cory import CoryConfig
from policies.generation.generator import GenerationError
from policies.rllib.stateless_runner import StatelessRunner
from policies.rllib.token_batch import ENDED, TASK_REWARD
from policies.rollout.chain_runner import ChainRunner
from policies.rollout.prompt_sampling import PromptRef
from policies.rollout.role_mapping import make_mapping
from tests.policies.conftest import BUNDLED, TINY

CHAINS: list[dict[str, Any]] = [
    {"num_agents": 1},
    {"num_agents": 2, "reward": "tests.policies.sample_rewards:from_all_inputs"},
    {"num_agents": 3},
    {"num_agents": 4, "weights": "lora", "observed": "last"},
    {
        **{"num_agents": 3, "num_policies": 1, "feedback": "tests.policies.sample_rewards:long_enough"},
        **{"observer_prompt": "{query}: {reference} ({feedback}). {query}"},
        **{"stop_when": "solved", "stop_in_training": True, "partner_reward": 0.5},
    },
]


def make_runner(**settings: Any) -> ChainRunner:
    """A runner with the bundled model's weights."""
    config = CoryConfig().cory(**{**TINY, **settings})
    config.validate()
    runner = ChainRunner(config=config, worker_index=0)
    for policy_id in runner.settings.policy_ids:
        runner._versions[policy_id] = 0
    return runner


@pytest.fixture(scope="module", params=CHAINS)
def runner(request: pytest.FixtureRequest, ray_session: None) -> Any:
    """A runner of each kind of chain."""
    runner = make_runner(**request.param)
    yield runner
    runner.stop()


def sample_chains(runner: ChainRunner, prompt_refs: list[PromptRef], **settings: Any) -> Any:
    mapping = make_mapping(runner.settings)
    return runner.sample(prompt_refs=prompt_refs, mapping=mapping, version=0, **settings)


def test_episodes_equal_those_of_the_environment_stepped_with_the_same_tokens(runner: ChainRunner) -> None:
    prompt_refs = [PromptRef(3), PromptRef(11), PromptRef(0)]
    rollout = sample_chains(runner, prompt_refs)
    env = cory_v0.env(**runner.settings.env_settings())
    for prompt_ref, episode in zip(prompt_refs, rollout.episodes, strict=True):
        env.reset(options={"query": prompt_ref.query})
        for role, agent in episode.agent_episodes.items():
            assert env.agent_selection == role
            expected, observation = env.observe(role), agent.observations[0]
            assert observation["length"] == expected["length"]
            np.testing.assert_array_equal(observation["tokens"], expected["tokens"])
            tokens, length = agent.actions[0]["tokens"], agent.actions[0]["length"]
            env.step({"tokens": np.array(tokens), "length": length})
        for role in runner.settings.agents:
            assert env.terminations[role] and not env.truncations[role]
            if role not in episode.agent_episodes:  # the chain stopped before
                assert env.rewards[role] == 0.0 and "task_reward" not in env.infos[role]
                continue
            agent = episode.agent_episodes[role]
            assert agent.is_terminated and len(agent) == 1
            assert env.rewards[role] == pytest.approx(agent.rewards[0], abs=1e-5)
            task_reward = agent.extra_model_outputs[TASK_REWARD][0]
            assert env.infos[role]["task_reward"] == pytest.approx(task_reward, abs=1e-5)
    env.close()


def test_a_reward_that_fails_drops_only_its_query(ray_session: None, tmp_path: Path) -> None:
    data = tmp_path / "queries.jsonl"
    rows = [{"query": f"The film number {i} is", "broken": i == 3} for i in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = {"reward": "tests.policies.sample_rewards:nan_if_broken", "on_reward_error": "skip"}
    runner = make_runner(data=str(data), eval_data=str(data), **reward)
    rollout = sample_chains(runner, [PromptRef(query) for query in range(8)])
    assert [prompt_ref.query for prompt_ref in rollout.prompt_refs] == [0, 1, 2, 4, 5, 6, 7] and rollout.counters[
        "dropped_chains"
    ] == 1
    assert rollout.counters["reward_seconds"] > 0
    runner.stop()


def test_feedback_that_fails_drops_only_its_query(ray_session: None, tmp_path: Path) -> None:
    data = tmp_path / "queries.jsonl"
    rows = [{"query": f"The film number {i} is", "broken": i == 3} for i in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    feedback = {"feedback": "tests.policies.sample_rewards:breaks_if_broken", "stop_when": "solved"}
    settings = {**feedback, "stop_in_training": True, "on_reward_error": "skip"}
    runner = make_runner(data=str(data), eval_data=str(data), **settings)
    rollout = sample_chains(runner, [PromptRef(query) for query in range(8)])
    assert [prompt_ref.query for prompt_ref in rollout.prompt_refs] == [0, 1, 2, 4, 5, 6, 7]
    assert rollout.counters["dropped_chains"] == 1
    assert {response["feedback"] for sample in rollout.samples for response in sample["responses"][:1]} == {"again"}
    runner.stop()


def test_chains_stop_in_training_only_if_asked_for_and_always_on_held_out_queries(ray_session: None) -> None:
    settings = {"feedback": "tests.policies.sample_rewards:always_solved", "stop_when": "solved"}
    for stop_in_training in (False, True):
        runner = make_runner(**settings, stop_in_training=stop_in_training)
        for split, stops in (("train", stop_in_training), ("test", True)):
            (sample,) = sample_chains(runner, [PromptRef(0)], split=split).samples
            assert len(sample["responses"]) == (1 if stops else 2)
            assert [response.get("feedback", "none") for response in sample["responses"]] == [None, "none"][
                : len(sample["responses"])
            ]
        runner.stop()


def test_the_environment_runs_inside_rllibs_pettingzoo_wrapper(runner: ChainRunner) -> None:
    env = PettingZooEnv(cory_v0.env(**runner.settings.env_settings()))
    observations, _ = env.reset(seed=0)
    for position, role in enumerate(runner.settings.agents):
        assert list(observations)[-1] == role
        observations, rewards, terminateds, _, _ = env.step({role: {"tokens": np.array([5, 6]), "length": 2}})
        assert terminateds["__all__"] == (position == runner.settings.num_agents - 1)
    assert set(rewards) == set(runner.settings.agents)
    env.close()


def test_responses_do_not_depend_on_the_rest_of_the_batch(runner: ChainRunner) -> None:
    batch = sample_chains(runner, [PromptRef(query) for query in range(5)])
    singles = [sample_chains(runner, [PromptRef(query)]) for query in range(5)]
    for episode, single in zip(batch.episodes, singles, strict=True):
        assert episode.agent_episodes.keys() == single.episodes[0].agent_episodes.keys()
        for role, agent in episode.agent_episodes.items():
            assert agent.actions[0] == single.episodes[0].agent_episodes[role].actions[0]


def test_responses_differ_between_updates_and_between_samples_of_a_query(runner: ChainRunner) -> None:
    first = sample_chains(runner, [PromptRef(0), PromptRef(0, 1)])
    second = sample_chains(runner, [PromptRef(0)], update=1)
    texts = [rollout["responses"][0]["text"] for rollout in (*first.samples, *second.samples)]
    assert len(set(texts)) == 3


def test_samples_contain_whether_each_response_ended_and_its_repetition(runner: ChainRunner) -> None:
    rollout = sample_chains(runner, [PromptRef(query) for query in range(4)])
    for sample, episode in zip(rollout.samples, rollout.episodes, strict=True):
        for response in sample["responses"]:
            agent = episode.agent_episodes[response["role"]]
            tokens = [int(token) for token in agent.actions[0]["tokens"]]
            bigrams = list(pairwise(tokens))
            assert response["ended"] == bool(agent.extra_model_outputs[ENDED][0])
            assert response["repetition"] == pytest.approx((len(bigrams) - len(set(bigrams))) / max(len(bigrams), 1))


def test_a_runner_rejects_another_weight_version_than_requested(runner: ChainRunner) -> None:
    with pytest.raises(GenerationError, match="llm_1 is at version 0, not 7"):
        mapping = make_mapping(runner.settings)
        runner.sample(prompt_refs=[PromptRef(0)], mapping=mapping, version=7)


def test_episodes_keep_the_role_mapping_they_were_generated_with(runner: ChainRunner) -> None:
    mapping = make_mapping(runner.settings).rotated()
    episode = runner.sample(prompt_refs=[PromptRef(0)], mapping=mapping, version=0).episodes[0]
    agents = {role: agent.module_id for role, agent in episode.agent_episodes.items()}
    assert agents and agents.items() <= mapping.as_dict().items()


def test_each_update_draws_one_response_limit_for_all_positions_and_held_out_queries_use_the_maximum(
    ray_session: None,
) -> None:
    runner = make_runner(min_response_tokens=2, max_response_tokens=6, reward="tests.cory_env.sample_rewards:length")
    prompt_refs = [PromptRef(query) for query in range(8)]
    limits = []
    for update in range(6):
        limits.append(runner.settings.response_limit(update))
        rollout = sample_chains(runner, prompt_refs, update=update)
        for role in runner.settings.agents:
            assert max(e.agent_episodes[role].actions[0]["length"] for e in rollout.episodes) == limits[-1]
    assert len(set(limits)) > 2
    held_out = sample_chains(runner, prompt_refs, update=limits.index(min(limits)), split="test")
    assert max(e.agent_episodes["pioneer"].actions[0]["length"] for e in held_out.episodes) == 6
    runner.stop()


def test_the_weight_sync_check_samples_short_responses_however_long_they_may_be(ray_session: None) -> None:
    runner = make_runner(**BUNDLED, max_response_tokens=150, num_agents=1)
    responses = runner.probe("llm_1", [[1, 2, 3]] * 8, range(8))
    assert max(len(response.tokens) for response in responses) == 64
    runner.stop()


def test_a_runners_error_reaches_the_caller_immediately() -> None:
    def fail(_: Any) -> None:
        raise ValueError("the error")

    with pytest.raises(ValueError, match="the error"):  # RLlib's own `apply` would sleep and end the process
        StatelessRunner.apply(cast(Any, None), fail)
