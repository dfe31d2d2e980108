"""Games of TextArena as environments."""

import random
import sys

import pytest
from pettingzoo.test import api_test

from cory_env.functions import ENVIRONMENT, load_function
from cory_env.text_envs.base import text_env
from cory_env.text_envs.instance import Instance, State

pytest.importorskip("textarena", reason="the extra textarena is not installed")

GAMES = ["KuhnPoker-v0", "TicTacToe-v0", "ConnectFour-v0-train", "Nim-v0-raw", "GuessTheNumber-v0"]
MOVES = ["[check]", "[bet]", "[call]", "[0]", "[4]", "[col 3]", "[1 1]", "[7]", "nonsense"]


def instance(name: str) -> Instance:
    return Instance(load_function(f"textarena:{name}", ENVIRONMENT)())


def play(game: Instance, seed: int, texts: random.Random, turns: int = 30) -> list[State]:
    """An episode of up to so many turns, with moves that are often allowed."""
    states = [game.reset(seed)]
    while states[-1].agent is not None and len(states) <= turns:
        move = texts.choice(MOVES)
        states.append(game.step(move))
    return states


@pytest.mark.parametrize("name", GAMES)
def test_games_run_and_depend_on_their_seeds_alone(name: str) -> None:
    game, other = instance(name), instance(name)
    assert len(game.possible_agents) == (1 if name.startswith("Guess") else 2)
    episodes = [play(game, seed, random.Random(seed)) for seed in range(20)]
    ended = [states for states in episodes if states[-1].agent is None]
    assert len(ended) > 10
    assert any(any(states[-1].rewards.values()) for states in ended)
    for seed in (7, 3):  # in another instance, while other random numbers are drawn, after other episodes
        random.seed(seed)
        assert play(other, seed, random.Random(seed)) == episodes[seed]


def test_two_games_that_take_turns_do_not_share_random_numbers() -> None:
    one, two = instance("KuhnPoker-v0"), instance("KuhnPoker-v0")
    alone = [play(one, seed, random.Random(1)) for seed in (1, 2)]
    states = [[one.reset(1)], [two.reset(2)]]
    moves = [random.Random(1), random.Random(1)]
    while any(part[-1].agent is not None for part in states):
        for game, part, texts in zip((one, two), states, moves, strict=True):
            if part[-1].agent is not None:
                move = texts.choice(MOVES)
                part.append(game.step(move))
    assert states == alone


def test_an_observation_is_what_is_new() -> None:
    game = instance("TicTacToe-v0")
    first = game.reset(0)
    second = game.step("[4]")
    third = game.step("[0]")
    assert (first.agent, second.agent, third.agent) == ("player_0", "player_1", "player_0")
    assert "You are Player 0" in first.messages[0]["content"] and "You are Player 1" in second.messages[0]["content"]
    assert not third.replaces and first.messages[0]["content"][:40] not in third.messages[0]["content"]
    assert len(third.messages[0]["content"]) < len(first.messages[0]["content"])


@pytest.mark.parametrize("name", ["KuhnPoker-v0", "TowerOfHanoi-v0-train"])
def test_games_pass_pettingzoo_s_own_test(name: str) -> None:
    api_test(text_env(load_function(f"textarena:{name}", ENVIRONMENT)()), num_cycles=30)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("KuhnPoker", r"TextArena has no game 'KuhnPoker'\. Similar: KuhnPoker-v0"),
        ("KuhnPoker-v0?num_players=3", r"KuhnPoker-v0 does not start: .*has to be 2, received 3"),
    ],
)
def test_unknown_games_and_numbers_of_players_are_named(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        instance(name)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"The package textarena is missing: pip install 'cory-rllib\[textarena\]'"
    ):
        instance("KuhnPoker-v0")
