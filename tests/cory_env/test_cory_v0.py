"""The PettingZoo environment."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pettingzoo.test import api_test, seed_test

from cory_env import cory_v0
from cory_env.episode import Action
from cory_env.tasks import make_task
from tests.cory_env.sample_tasks import LENGTH, PAPER_CHAIN, reviews, tokenizer, tokens_of


def make(num_agents: int = 2, **settings: Any) -> cory_v0.raw_env:
    return cory_v0.env(reviews(), num_agents, tokenizer=tokenizer(), **{**PAPER_CHAIN, **settings})


def action(env: cory_v0.raw_env, text: str) -> Action:
    tokens = tokens_of(text)
    padded = np.zeros(env.chain.max_response_tokens, np.int64)
    padded[: len(tokens)] = tokens
    return {"tokens": padded, "length": len(tokens)}


@pytest.mark.filterwarnings("ignore::UserWarning")  # api_test's advice on Dict spaces and numbered names
@pytest.mark.parametrize(("num_agents", "observed"), [(1, "all"), (2, "all"), (3, "all"), (3, "last")])
def test_api_test_of_pettingzoo_passes(num_agents: int, observed: str) -> None:
    env = make(num_agents, observed=observed)
    api_test(env, num_cycles=30)
    env.close()


@pytest.mark.parametrize("num_agents", [1, 2, 3])
def test_seed_test_of_pettingzoo_passes(num_agents: int) -> None:
    seed_test(lambda: make(num_agents), num_cycles=30)


def test_the_default_is_imdb_with_two_agents() -> None:
    env = cory_v0.env(reward=LENGTH)
    assert env.possible_agents == ["pioneer", "observer"]
    assert env.chain.task.name == "imdb" and str(env) == "cory_v0"


def test_rewards_arrive_with_the_last_step() -> None:
    env = make(2, partner_reward=0.5)
    env.reset(options={"query": 1})
    assert env.agent_selection == "pioneer"
    env.step(action(env, " like it"))
    assert env.agent_selection == "observer"
    assert env.rewards == {"pioneer": 0.0, "observer": 0.0} and not any(env.terminations.values())
    env.step(action(env, " love it so"))
    assert env.rewards == {"pioneer": 8 + 0.5 * 11, "observer": 11 + 0.5 * 8}
    assert all(env.terminations.values()) and not any(env.truncations.values())
    assert env.infos["pioneer"] == {"query": 1, "truncated_prompt": False, "task_reward": 8.0, "completion": " like it"}
    for agent in ("pioneer", "observer"):
        assert env.agent_selection == agent
        env.step(None)
    assert env.agents == []
    env.close()


@pytest.mark.parametrize("transfer", [True, False])
def test_the_observer_sees_the_pioneer_s_response_only_with_knowledge_transfer(transfer: bool) -> None:
    env = make(2, knowledge_transfer=transfer)
    env.reset(options={"query": 0})
    env.step(action(env, " a great deal of fun."))
    observation, *_ = env.last()
    text = tokenizer().decode(observation["tokens"][: observation["length"]])
    expected = 'I can make this sentence "This movie was a great deal of fun." more positive: This movie was'
    assert text == (expected if transfer else "This movie was")
    assert observation in env.observation_space("observer")


def test_reset_selects_queries_by_seed_or_options() -> None:
    def queries(seed: int | None, env: cory_v0.raw_env) -> list[object]:
        query_ids = []
        for k in range(8):
            env.reset(seed=seed if k == 0 else None)
            query_ids.append(env.infos["pioneer"]["query"])
        return query_ids

    assert queries(3, make()) == queries(3, make())
    assert set(queries(3, make())) == {0, 1, 2}
    env = make()
    env.reset(options={"query": 2})
    assert env.infos["pioneer"]["query"] == 2
    for wrong in (3, -1, "0", None):
        with pytest.raises(ValueError, match="expects an integer from 0 to 2"):
            env.reset(options={"query": wrong})


def test_the_test_split_can_be_selected() -> None:
    env = make(split="test")
    env.reset()
    observation, *_ = env.last()
    assert tokenizer().decode(observation["tokens"][: observation["length"]]) == "My aunt"


def test_calls_out_of_order_raise() -> None:
    env = make(1, render_mode="ansi")
    for call in (lambda: env.step(None), lambda: env.observe("pioneer"), env.render, env.last, env.agent_iter):
        with pytest.raises(ValueError, match=r"requires an episode\. Call reset"):
            call()
    env.reset()
    with pytest.raises(ValueError, match=r"turn of pioneer, so its action must be a response"):
        env.step(None)
    env.step(action(env, " fun"))
    with pytest.raises(ValueError, match="pioneer has finished, so its action must be None"):
        env.step(action(env, " fun"))
    env.step(None)
    with pytest.raises(ValueError, match="after the episode's end"):
        env.step(None)
    env.close()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_a_copy_is_independent_of_the_original(duplicate: Callable[[Any], Any]) -> None:
    env = make(2)
    env.reset(seed=0)
    env.step(action(env, " a"))
    env.step(action(env, " b"))  # starts the reward process
    env.reset()
    env.step(action(env, " a good"))
    other = duplicate(env)
    for copied, text in ((other, " film"), (env, " film indeed")):
        copied.step(action(env, text))
        assert copied.infos["observer"]["completion"] == text and copied.rewards["observer"] == len(" a good" + text)
    other.close()
    env.reset()
    env.step(action(env, " a"))
    env.step(action(env, " b"))
    assert env.rewards["pioneer"] == 4
    env.close()


def test_an_invalid_action_names_the_agent_and_can_be_corrected() -> None:
    env = make()
    env.reset()
    env.step(action(env, " fun"))
    with pytest.raises(ValueError, match=r"(?s)observer: invalid action .* ids from 0 to 4095"):
        env.step({"tokens": np.full(15, 9999), "length": 1})
    with pytest.raises(ValueError, match=r"(?s)observer: invalid action .* 1 to 15 ids"):
        env.step({"tokens": np.zeros((2, 15), np.int64), "length": 1})
    env.step(action(env, " fun"))
    assert env.terminations["observer"]
    env.close()


def test_render_returns_or_prints_the_chain(capsys: pytest.CaptureFixture[str]) -> None:
    rendered = "query 0: This movie was\npioneer [task reward 4.000]: fun\nobserver [task reward 5.000]: nice"
    for mode in ("ansi", "human"):
        env = make(render_mode=mode)
        env.reset(options={"query": 0})
        env.step(action(env, " fun"))
        env.step(action(env, " nice"))
        env.step(None)
        if mode == "ansi":
            assert env.render() == rendered
        env.close()
    assert capsys.readouterr().out == rendered + "\n"
    with pytest.raises(ValueError, match="must be one of ansi, human"):
        make(render_mode="rgb_array")
    no_mode = make()
    no_mode.reset()
    with pytest.raises(ValueError, match="requires a render mode"):
        no_mode.render()


def test_task_settings_conflict_with_a_task_object() -> None:
    with pytest.raises(ValueError, match="require a task's name"):
        make(min_query_tokens=2)
    with pytest.raises(ValueError, match="min_query_tokens=2 conflicts with max_query_tokens=None"):
        make_task("imdb", min_query_tokens=2)
    with pytest.raises(ValueError, match="require a task's name"):
        make(prompt="{query}")


def test_an_unloadable_tokenizer_is_reported() -> None:
    with pytest.raises(ValueError, match="The tokenizer of '/no/such/folder' cannot be loaded"):
        cory_v0.env(reward=LENGTH, tokenizer="/no/such/folder")


def test_neither_torch_nor_ray_is_imported_for_a_plain_reward() -> None:
    code = (
        "import sys; from cory_env import cory_v0; env = cory_v0.env(reward='json:dumps'); env.reset(seed=1); "
        "env.step(env.action_space('pioneer').sample()); env.observe('observer'); "
        "assert not {'torch', 'ray', 'vllm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
