"""Reward functions passed as objects."""

import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial

import psutil
import pytest

from cory_env.functions import SpecError, load_function
from cory_env.pickled import display_name, spec_of
from cory_env.rewarding.process import Reward
from cory_env.rewarding.spec import short_names, weighted_sum
from cory_env.rewarding.worker import RewardError, RewardWorker
from policies.settings.settings import SettingsError
from tests.cory_env import sample_rewards
from tests.paper import make_settings


def make_length_reward(length: float) -> Callable[[list[str]], list[float]]:
    def near(completions: list[str]) -> list[float]:
        return [-abs(len(text) - length) for text in completions]

    return near


def test_functions_in_modules_have_names_and_other_functions_have_code() -> None:
    function_name = next(
        name for name in dir(sample_rewards) if callable(getattr(sample_rewards, name)) and name.islower()
    )
    assert spec_of(getattr(sample_rewards, function_name)) == f"tests.cory_env.sample_rewards:{function_name}"
    spec = spec_of(make_length_reward(4))
    assert spec.startswith("pickled:near:") and display_name(spec) == "near"
    assert list(load_function(spec)(completions=["four", "five!"])) == [0, -1]
    assert display_name(spec_of(partial(str.count, "y"))) == "count"


def test_functions_without_a_module_get_unique_names() -> None:
    settings = make_settings({"reward": [make_length_reward(4), make_length_reward(1)], "reward_weights": [1, 2]})
    assert settings.reward_spec is not None
    with RewardWorker(settings.reward_spec, timeout=60) as worker:
        (reward,) = worker.rewards(["query"], ["four"], {})
    assert isinstance(reward, Reward) and float(reward) == -6 and dict(reward.parts) == {"near_0": 0, "near_1": -3}


def test_large_code_reaches_the_process_and_is_not_visible_to_other_users() -> None:
    def make_large_reward(text: str) -> Callable[[list[str]], list[float]]:
        return lambda completions: [float(len(text)) for _ in completions]

    functions = [make_large_reward(letter * 45_000) for letter in "abcde"]
    spec = weighted_sum([spec_of(function) for function in functions])
    assert len(spec) > 300_000
    with RewardWorker(spec, timeout=60) as worker:
        assert worker.rewards(["query"], ["text"], {}) == [225_000.0]
        processes = [[*process.cmdline(), *process.environ().values()] for process in psutil.Process().children()]
        assert any("cory_env.rewarding.child" in word for words in processes for word in words)
        assert not any("pickled:" in word for words in processes for word in words)


def test_a_script_s_function_includes_the_objects_that_it_refers_to() -> None:
    script = """
from cory_env.rewarding.worker import RewardWorker
from tests.paper import make_settings
SCORES = {"good": 2.0}
def score(text): return SCORES.get(text, 0.0)
def reward(completions): return [score(text) for text in completions]
with RewardWorker(make_settings({"reward": reward}).reward_spec) as worker:
    print(worker.rewards(["", ""], ["good", "bad"], {}))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.stdout == "[2.0, 0.0]\n", result.stderr


def test_an_error_shows_the_function_s_name_without_its_code() -> None:
    def broken(completions: list[str]) -> list[float]:
        return [1 / 0]

    with (
        RewardWorker(spec_of(broken)) as worker,
        pytest.raises(RewardError, match=r"^The reward broken failed on sample 0 of 1, .* raised ZeroDivisionError"),
    ):
        worker.rewards(["query"], ["text"], {})


def test_unpicklable_and_large_functions_are_rejected() -> None:
    lock, large = threading.Lock(), "x" * 100_000

    def locked(completions: list[str]) -> list[float]:
        with lock:
            return [0.0]

    def heavy(completions: list[str]) -> list[float]:
        return [float(len(large))]

    with pytest.raises(SettingsError, match=r"function locked cannot be sent .*cannot pickle '_thread.lock'"):
        make_settings({"reward": locked})
    with pytest.raises(SettingsError, match=r"function heavy has 1\d\d,\d+ characters"):
        make_settings({"reward": heavy})


def test_code_that_cannot_be_loaded_is_rejected() -> None:
    with pytest.raises(
        SpecError, match=r"^The reward near was passed as a Python function, and its saved code cannot be loaded here"
    ):
        load_function("pickled:near:gASVAAAA")
    assert short_names(["pickled:near:gASV", "my_rewards:far"]) == ["near", "far"]
