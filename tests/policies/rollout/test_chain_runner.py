"""The runner's episodes, against the PettingZoo environment stepped alone."""

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
from policies.rollout.role_mapping import RoleMapping
from tests.policies.conftest import TINY

CHAINS: list[dict[str, Any]] = [
    {"num_agents": 1},
    {"num_agents": 2, "reward": "tests.policies.sample_rewards:of_all"},
    {"num_agents": 3},
    {"num_agents": 4, "weights": "lora", "observed": "last"},
    {"num_agents": 4, "weights": "lora", "observed": "best"},
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


def play(runner: ChainRunner, prompt_refs: list[PromptRef], **settings: Any) -> Any:
    mapping = RoleMapping(runner.settings.roles, runner.settings.policy_ids)
    return runner.sample(prompt_refs=prompt_refs, mapping=mapping, version=0, **settings)


def test_episodes_equal_those_of_the_environment_stepped_alone_with_the_same_tokens(runner: ChainRunner) -> None:
    prompt_refs = [PromptRef(3), PromptRef(11), PromptRef(0)]
    rollout = play(runner, prompt_refs)
    env = cory_v0.env(**runner.settings.env_settings())
    for prompt_ref, episode in zip(prompt_refs, rollout.episodes, strict=True):
        env.reset(options={"query": prompt_ref.query})
        for role in runner.settings.roles:
            agent = episode.agent_episodes[role]
            assert env.agent_selection == role
            seen, played = env.observe(role), agent.observations[0]
            assert seen["length"] == played["length"]
            np.testing.assert_array_equal(seen["tokens"], played["tokens"])
            tokens, length = agent.actions[0]["tokens"], agent.actions[0]["length"]
            env.step({"tokens": np.array(tokens), "length": length})
        for role in runner.settings.roles:
            agent = episode.agent_episodes[role]
            assert agent.is_terminated and len(agent) == 1
            assert env.terminations[role] and not env.truncations[role]
            assert env.rewards[role] == pytest.approx(agent.rewards[0], abs=1e-5)
            task_reward = agent.extra_model_outputs[TASK_REWARD][0]
            assert env.infos[role]["task_reward"] == pytest.approx(task_reward, abs=1e-5)
    env.close()


@pytest.mark.parametrize("observed", ["last", "best"])
def test_an_agent_sees_the_one_earlier_response_that_it_is_to_see(ray_session: None, observed: str) -> None:
    runner = make_runner(num_agents=4, weights="lora", observed=observed)
    rollout = play(runner, [PromptRef(query) for query in range(16)])
    tokenizer, places = runner.tokenizers["llm_1"], set()
    for sample, episode in zip(rollout.samples, rollout.episodes, strict=True):
        rewards = [answer["task_reward"] for answer in sample["responses"]]
        for position, role in list(enumerate(runner.settings.roles))[1:]:
            observation = episode.agent_episodes[role].observations[0]
            shown = tokenizer.decode(observation["tokens"][: observation["length"]])
            place = position - 1 if observed == "last" else rewards.index(max(rewards[:position]))
            query, text = sample["query"], sample["responses"][place]["text"]
            assert shown == f'I can make this sentence "{query}{text}" more positive: {query}'
            places.add((position, place))
    assert observed == "last" or {(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)} <= places
    runner.stop()


def test_a_reward_that_fails_on_a_response_to_be_seen_drops_that_query_alone(ray_session: None, tmp_path: Path) -> None:
    data = tmp_path / "queries.jsonl"
    rows = [{"query": f"The film number {i} is", "broken": i == 3} for i in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = {"reward": "tests.policies.sample_rewards:unless_broken", "on_reward_error": "skip"}
    runner = make_runner(num_agents=3, weights="lora", observed="best", data=str(data), eval_data=str(data), **reward)
    rollout = play(runner, [PromptRef(query) for query in range(8)])
    assert [prompt_ref.query for prompt_ref in rollout.prompt_refs] == [0, 1, 2, 4, 5, 6, 7] and rollout.counters[
        "dropped_chains"
    ] == 1
    assert rollout.counters["reward_seconds"] > 0
    runner.stop()


def test_the_environment_runs_inside_rllibs_pettingzoo_wrapper(runner: ChainRunner) -> None:
    env = PettingZooEnv(cory_v0.env(**runner.settings.env_settings()))
    observations, _ = env.reset(seed=0)
    for position, role in enumerate(runner.settings.roles):
        assert list(observations)[-1] == role
        observations, rewards, terminateds, _, _ = env.step({role: {"tokens": np.array([5, 6]), "length": 2}})
        assert terminateds["__all__"] == (position == runner.settings.num_agents - 1)
    assert set(rewards) == set(runner.settings.roles)
    env.close()


def test_responses_do_not_depend_on_what_else_is_in_the_batch(runner: ChainRunner) -> None:
    together = play(runner, [PromptRef(q) for q in range(5)])
    alone = [play(runner, [PromptRef(q)]) for q in range(5)]
    for episode, single in zip(together.episodes, alone, strict=True):
        for role in runner.settings.roles:
            assert episode.agent_episodes[role].actions[0] == single.episodes[0].agent_episodes[role].actions[0]


def test_updates_and_samples_of_one_query_draw_different_responses(runner: ChainRunner) -> None:
    first = play(runner, [PromptRef(0), PromptRef(0, 1)])
    second = play(runner, [PromptRef(0)], update=1)
    texts = [rollout["responses"][0]["text"] for rollout in (*first.samples, *second.samples)]
    assert len(set(texts)) == 3


def test_samples_tell_whether_each_response_ended_and_how_much_of_it_repeats(runner: ChainRunner) -> None:
    rollout = play(runner, [PromptRef(query) for query in range(4)])
    for sample, episode in zip(rollout.samples, rollout.episodes, strict=True):
        for response in sample["responses"]:
            agent = episode.agent_episodes[response["role"]]
            tokens = [int(token) for token in agent.actions[0]["tokens"]]
            pairs = list(pairwise(tokens))
            assert response["ended"] == bool(agent.extra_model_outputs[ENDED][0])
            assert response["repetition"] == pytest.approx((len(pairs) - len(set(pairs))) / max(len(pairs), 1))


def test_a_runner_refuses_to_play_with_other_weights_than_asked_for(runner: ChainRunner) -> None:
    with pytest.raises(GenerationError, match="llm_1 is at version 0, not 7"):
        mapping = RoleMapping(runner.settings.roles, runner.settings.policy_ids)
        runner.sample(prompt_refs=[PromptRef(0)], mapping=mapping, version=7)


def test_episodes_remember_which_llm_played_which_role(runner: ChainRunner) -> None:
    mapping = RoleMapping(runner.settings.roles, runner.settings.policy_ids).rotated()
    episode = runner.sample(prompt_refs=[PromptRef(0)], mapping=mapping, version=0).episodes[0]
    assert {role: agent.module_id for role, agent in episode.agent_episodes.items()} == mapping.as_dict()


def test_each_update_draws_one_longest_response_for_all_positions_and_held_out_queries_take_the_longest(
    ray_session: None,
) -> None:
    runner = make_runner(min_response_tokens=2, max_response_tokens=6, reward="tests.cory_env.sample_rewards:length")
    prompt_refs = [PromptRef(query) for query in range(8)]
    limits = []
    for update in range(6):
        limits.append(runner.settings.response_limit(update))
        rollout = play(runner, prompt_refs, update=update)
        for role in runner.settings.roles:
            assert max(e.agent_episodes[role].actions[0]["length"] for e in rollout.episodes) == limits[-1]
    assert len(set(limits)) > 2
    held_out = play(runner, prompt_refs, update=limits.index(min(limits)), split="test")
    assert max(e.agent_episodes["pioneer"].actions[0]["length"] for e in held_out.episodes) == 6
    runner.stop()


def test_what_a_call_of_a_runner_raises_reaches_its_caller_at_once() -> None:
    def fail(_: Any) -> None:
        raise ValueError("as said")

    with pytest.raises(ValueError, match="as said"):  # RLlib's own `apply` would sleep, and end the process
        StatelessRunner.apply(cast(Any, None), fail)
