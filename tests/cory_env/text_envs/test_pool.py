"""Environments in child processes: order, kills and replays, and one sentence per way to break the contract."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pettingzoo.test import api_test

from cory_env.chain import Chain
from cory_env.chain_settings import Role
from cory_env.rewarding.worker import RewardError
from cory_env.text_envs.base import text_env
from cory_env.text_envs.episode import EnvEpisode
from cory_env.text_envs.pool import EnvPool
from cory_env.text_envs.sudoku import repair
from cory_env.text_envs.task import make_env_task
from cory_env.tokenizer import load_tokenizer
from tests.text_games import Duel, TextGame

NUM_EPISODES = 6


def make_episodes(env: str, agents: tuple[str, ...], number: int = NUM_EPISODES, **settings: Any) -> list[EnvEpisode]:
    task = make_env_task(env, settings.pop("max_turns", 8))
    values = {
        "max_prompt_tokens": 200,
        "max_response_tokens": 20,
        "roles": [Role(agent) for agent in agents],
        **settings,
    }
    chain = Chain(task, load_tokenizer(None), **values)
    return [EnvEpisode(chain, task.train[seed]) for seed in range(number)]


def respond(episode: EnvEpisode) -> None:
    text = "na" * random.Random(f"{episode.seed} {len(episode.responses)}").randint(1, 6)
    tokens = episode.encoder(len(episode.responses)).tokenizer(text)["input_ids"]
    episode.respond({"tokens": tokens, "length": len(tokens)})


def play(pool: EnvPool, episodes: list[EnvEpisode], seed: int = 0) -> Iterator[int]:
    """Plays episodes in a random order of responses; yields the number of responses so far."""
    generator = random.Random(seed)
    for index, episode in enumerate(episodes):
        pool.submit(index, episode)
    ready: list[int] = []
    num_responses = 0
    while any(episode.is_waiting or episode.agent is not None for episode in episodes):
        if any(episode.is_waiting for episode in episodes):
            ready += [index for index in pool.collect("none" if ready else "any") if episodes[index].agent is not None]
        if ready:
            index = ready.pop(generator.randrange(len(ready)))
            respond(episodes[index])
            pool.submit(index, episodes[index])
            num_responses += 1
            yield num_responses


def outcome(episodes: list[EnvEpisode]) -> list[Any]:
    return [(e.agents, e.completions, [p.tokens for p in e.prompts], e.turn_rewards(), e.returns()) for e in episodes]


def test_outcomes_do_not_depend_on_the_number_of_processes_nor_on_the_order() -> None:
    outcomes = []
    for num_processes in (1, 3):
        with EnvPool("tests.text_games:TextGame?rounds=3", num_processes=num_processes, timeout=30) as pool:
            assert pool.agents() == ("first", "second")
            episodes = make_episodes(pool.env, pool.agents())
            for _ in play(pool, episodes, num_processes):
                pass
            outcomes.append(outcome(episodes))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0][0] == ("first", "second") * 3


def test_a_kill_replays_the_episodes_of_that_process(caplog: pytest.LogCaptureFixture) -> None:
    env = "tests.text_games:TextGame?rounds=3"
    outcomes = []
    for is_killed in (False, True):
        with EnvPool(env, num_processes=2, timeout=30) as pool:
            episodes = make_episodes(env, ("first", "second"))
            for num_responses in play(pool, episodes):
                if is_killed and num_responses in (5, 17):
                    process = pool._hosts[num_responses % 2].start()._process
                    process.kill()
                    process.wait()
            outcomes.append(outcome(episodes))
    assert outcomes[0] == outcomes[1]
    assert "replaying its episodes" in caplog.text


def test_an_episode_that_takes_another_course_when_replayed_fails() -> None:
    with EnvPool("tests.text_games:Moody", timeout=30, on_error="skip") as pool:
        episodes = make_episodes(pool.env, ("first", "second"), max_prompt_tokens=400)
        for num_responses in play(pool, episodes):
            if num_responses == 3:
                pool._hosts[0].start()._process.kill()
        failed = [episode for episode in episodes if episode.failed]
        assert pool.skipped == len(failed) > 0
        assert all("took another course" in episode.error for episode in failed)


WAYS = {
    "raise": "it raised RuntimeError: out of cards",
    "hang": "it ran longer than its time limit of 2 s and was stopped",
    "exit": "it ended its process with exit code 3",
    "nan": "it gave second the reward nan instead of a finite number",
    "text": "it gave first the reward 'much' instead of a finite number",
    "number": "it returned the observation 3 (int) instead of a text or a list of messages",
    "half": "it returned an observation that contains half of a surrogate pair",
    "assistant": "it returned a conversation whose last message is the assistant's",
    "tools": "it returned infos with the tools ['dig'] instead of a list of JSON schemas",
    "dead": "it selects agent 'first' again, although it is done",
    "stranger": "it selected agent 'stranger', which is not among its possible_agents",
}


@pytest.mark.parametrize(("way", "reason"), WAYS.items())
def test_a_broken_environment_is_named_with_its_seed_agent_and_turn(way: str, reason: str) -> None:
    env = f"tests.text_games:Broken?way={way}"
    with EnvPool(env, timeout=2) as pool, pytest.raises(RewardError) as error:
        for _ in play(pool, make_episodes(env, ("first", "second"))):
            pass
    message = str(error.value)
    pattern = re.escape(f"The environment {env} failed at second's turn 1 with seed ") + "[135]: " + re.escape(reason)
    assert re.match(pattern, message) and "on_reward_error=skip" in message


def test_broken_episodes_are_skipped_and_counted_and_the_others_go_on() -> None:
    env = "tests.text_games:Broken?way=hang"
    with EnvPool(env, num_processes=2, timeout=1, on_error="skip") as pool:
        episodes = make_episodes(env, ("first", "second"))
        for _ in play(pool, episodes):
            pass
        assert [episode.failed for episode in episodes] == [False, True] * 3
        assert pool.skipped == 3
        assert all(len(episode.responses) == 4 for episode in episodes if not episode.failed)


def test_a_kill_by_the_system_is_tried_again(tmp_path: Path) -> None:
    env = f"tests.text_games:Broken?way=kill&once={tmp_path / 'once'}"
    with EnvPool(env, timeout=30) as pool:
        episodes = make_episodes(env, ("first", "second"))
        for _ in play(pool, episodes):
            pass
    assert all(len(episode.responses) == 4 for episode in episodes)


def test_episodes_that_never_end_are_truncated() -> None:
    with EnvPool("tests.text_games:Endless", timeout=30) as pool:
        episodes = make_episodes(pool.env, ("first", "second"), max_turns=3)
        for _ in play(pool, episodes):
            pass
    assert all(episode.is_truncated and episode.agents == ("first", "second") * 3 for episode in episodes)
    with EnvPool("tests.text_games:Endless", timeout=30) as pool:
        episodes = make_episodes(pool.env, ("first", "second"), max_prompt_tokens=60)
        for _ in play(pool, episodes):
            pass
    assert all(episode.is_truncated and len(episode.prompts[-1].tokens) <= 60 for episode in episodes)


def test_a_first_prompt_that_is_too_long_is_an_error() -> None:
    env = "tests.text_games:TextGame"
    with EnvPool(env, timeout=30) as pool, pytest.raises(RewardError, match=r"begins with a prompt of \d+ tokens"):
        for _ in play(pool, make_episodes(env, ("first", "second"), max_prompt_tokens=3)):
            pass


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ("tests.text_games:no_environment", "returned \\['first'\\] \\(list\\), not a PettingZoo AEC environment"),
        ("tests.text_games:missing", "has no function 'missing'"),
        ("tests.nowhere:missing", "not found"),
        ("tests.text_games:TextGame?rounds=many", "raised ValueError: invalid literal"),
    ],
)
def test_what_makes_no_environment_is_rejected(env: str, reason: str) -> None:
    with EnvPool(env, timeout=30) as pool, pytest.raises(RewardError, match=reason):
        pool.agents()


@pytest.mark.parametrize("env", [TextGame(), Duel(), repair(), repair(prompts="marks", turns="3")])
def test_pettingzoo_accepts_environments_with_the_spaces_of_text(env: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        api_test(text_env(env), num_cycles=50)


def test_an_agent_may_act_twice_in_a_row() -> None:
    with EnvPool("tests.text_games:Twice", timeout=30) as pool:
        (episode,) = make_episodes(pool.env, ("first", "second"), 1)
        for _ in play(pool, [episode]):
            pass
    assert episode.agents == ("first", "first", "second") * 2


def test_rewards_belong_to_the_turn_before_them() -> None:
    with EnvPool("tests.text_games:Duel?rounds=2", timeout=30) as pool:
        episodes = make_episodes(pool.env, ("first", "second"))
        for _ in play(pool, episodes):
            pass
    for episode in episodes:
        lengths = [len(text) for text in episode.completions]
        signs = [(a > b) - (a < b) for a, b in zip(lengths[::2], lengths[1::2], strict=True)]
        expected = [(sign, -sign) for round_sign in signs for sign in (round_sign, -round_sign)]
        assert episode.turn_rewards() == expected
        assert episode.returns() == {"first": sum(signs), "second": -sum(signs)}


def test_an_environment_may_use_a_module_named_like_one_of_our_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "policies.py").write_text("AGENT = 'solo'\n")
    (tmp_path / "their_game.py").write_text(
        "from policies import AGENT\nfrom tests.text_games import TextGame\n\n\n"
        "def make():\n    return TextGame(agents=AGENT)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))
    with EnvPool("their_game:make", agents=("solo",), num_processes=1, timeout=60.0) as pool:
        episodes = make_episodes("their_game:make", ("solo",), number=1)
        assert [*play(pool, episodes)] == [1, 2]
