"""Rewards that are weighted sums of several functions."""

import pickle

import pytest

from cory_env.episode import ChainEpisode
from cory_env.functions import SpecError
from cory_env.rewarding.child import call_all, load_functions
from cory_env.rewarding.episodes import reward_episodes
from cory_env.rewarding.process import Batch, Reward
from cory_env.rewarding.spec import parse_sum, short_names, weighted_sum
from cory_env.rewarding.worker import RewardError, RewardWorker
from tests.cory_env.sample_tasks import QUERIES, chain, response

MODULE = "tests.cory_env.sample_rewards:"
COMPLETIONS = ["a", "bb", "ccc"]


def worker(*functions: str, weights: list[float] | None = None, **settings: str) -> RewardWorker:
    return RewardWorker(weighted_sum([MODULE + name for name in functions], weights), timeout=20, **settings)  # type: ignore[arg-type]


def test_the_reward_is_the_weighted_sum_and_has_its_parts() -> None:
    with worker("length", "fixed?value=4", weights=[1.0, -0.5]) as reward_worker:
        rewards = reward_worker.rewards(["query"] * 3, COMPLETIONS, {})
        assert reward_worker.rewards(["query"], ["four"], {}) == [2.0]
    assert rewards == [-1.0, 0.0, 1.0]
    assert [getattr(reward, "parts", None) for reward in rewards] == [
        {"length": n, "fixed": 4.0} for n in (1.0, 2.0, 3.0)
    ]
    copied = pickle.loads(pickle.dumps(rewards[2]))
    assert copied == 1.0 and isinstance(copied, Reward) and copied.parts == {"length": 3.0, "fixed": 4.0}


def test_weights_default_to_one_and_a_single_function_keeps_its_name() -> None:
    with worker("length", "brevity") as reward_worker:
        assert reward_worker.rewards(["query"] * 2, COMPLETIONS[:2], {}) == [0.5, 1.0]
    assert weighted_sum([MODULE + "length"]) == MODULE + "length"
    with worker("length", weights=[0.5]) as single:
        assert single.rewards(["query"] * 2, COMPLETIONS[:2], {}) == [0.5, 1.0]


def test_each_function_gets_its_columns_and_start_returns_all_required_ones() -> None:
    with worker("with_column", "count_columns") as reward_worker:
        assert reward_worker.rewards(["query"] * 2, ["4", "5"], {"answer": ["4", "4"], "other": [1, 2]}) == [4.0, 3.0]
        assert reward_worker.start() == ("completions", "answer")


def test_parts_reach_the_rewards_of_episodes() -> None:
    episode = ChainEpisode(chain(2), QUERIES[0])
    for text in (" good", " a very good film"):
        episode.respond(response(text))
    with worker("length", "observer_bonus", weights=[0.0, 2.0]) as reward_worker:
        (rewards,) = reward_episodes(reward_worker, [episode])
    assert rewards == [0.0, 2.0]
    assert [reward.parts["observer_bonus"] for reward in rewards if isinstance(reward, Reward)] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises", rf"sample 1 of 3.*it calls {MODULE}raises, which raised RuntimeError"),
        (
            "returns_none",
            rf"sample 1 of 3.*it calls {MODULE}returns_none, which returned None .* instead of a finite",
        ),
        ("inserts", rf"it calls {MODULE}inserts, which returned \d values"),
    ],
)
def test_a_failing_function_is_reported(function: str, message: str) -> None:
    texts = ["a", "bad", "ccc"]
    with worker("length", function) as reward_worker, pytest.raises(RewardError, match=message):
        reward_worker.rewards(["query"] * 3, texts, {})
    if function == "inserts":
        return
    with worker("length", function, on_error="skip") as reward_worker:
        rewards = reward_worker.rewards(["query"] * 3, texts, {})
        assert reward_worker.skipped == 1
    assert rewards[1] is None and isinstance(rewards[2], Reward) and rewards[2].parts["length"] == 3.0


def test_a_function_that_cannot_be_loaded_or_called_rejects_the_sum() -> None:
    with worker("length", "no_such") as reward_worker, pytest.raises(RewardError, match="no function 'no_such'"):
        reward_worker.start()
    with (
        worker("length", "with_column") as reward_worker,
        pytest.raises(RewardError, match=f"cannot be used: it calls {MODULE}with_column, which requires answer"),
    ):
        reward_worker.rewards(["query"], ["x"], {})


def test_short_names_omit_the_module_if_unique() -> None:
    assert short_names(["a:f", "b:g?x=1"]) == ["f", "g"]
    assert short_names(["a:f", "b:f", "b:g"]) == ["a:f", "b:f", "g"]


def test_sums_round_trip_and_malformed_ones_are_rejected() -> None:
    specs, weights = ["a:f?x=1", "b.c:g"], [1e-05, -2.0]
    assert parse_sum(weighted_sum(specs, weights)) == list(zip(specs, weights, strict=True))
    for weights in ([1.0], [1.0, 1.0, 1.0]):
        with pytest.raises(SpecError, match=rf"2 reward functions, but {len(weights)} reward_weights"):
            weighted_sum(specs, weights)
    for spec, message in (
        ("a:f + a:f", "repeats"),
        ("x * a:f", r"invalid weight 'x'\. Write a number before '\*'\.$"),
        ("nan * a:f", "invalid weight"),
        ("1_0 * a:f", "invalid weight"),
        ("a:f?text=a * b", r"invalid weight 'a:f\?text=a'.* In a setting's value, write \+ as %2B, and \* as %2A\."),
        ("a:f?text=a + b", r"Invalid reward 'b'.* In a setting's value, write \+ as %2B, and \* as %2A\."),
        ("a:f?text=a&b", "& in a value is written %26"),
        ("a:f?text=%ff", "Invalid reward"),
        ("a:f + b", "Write module:function"),
    ):
        with pytest.raises(SpecError, match=message):
            parse_sum(spec)


@pytest.mark.parametrize(
    "value", ["a * b", "a + b", "a & b=c", "100%", "%41", "1.0 * a:f + 2 * b:g", "?x=1", "naïve ✓"]
)
def test_values_of_settings_may_contain_any_text(value: str) -> None:
    escaped = value.replace("%", "%25").replace("+", "%2B").replace("*", "%2A").replace("&", "%26")
    in_list = value.replace("%", "%25").replace("&", "%26")  # each entry of a list is one function

    def compute(function: str, weights: list[float] | None = None) -> object:
        """The reward, without a process of its own."""
        functions = [MODULE + function, *([] if weights is None else [f"{MODULE}length"])]
        batch = Batch({"prompts": ["query"], "completions": [value]})
        return call_all(load_functions(weighted_sum(functions, weights)), batch).values[0]

    for function, expected in ((f"value_of?value={escaped}&other=x", 1.0), (f"value_of?other={escaped}", 2.0)):
        assert compute(function) == expected and compute(function, [2.0, 0.0]) == 2 * expected
    assert compute(f"value_of?value={in_list}", [2.0, 0.0]) == 2.0


def test_a_weighted_sum_that_fp32_cannot_hold_is_a_failure() -> None:
    for functions, weights in (
        (["fixed?value=1e15"], [2.0]),
        (["fixed?value=1e9", "fixed?value=-1e9"], [1e300, 1e300]),
    ):
        names = [f"{name}&unused={k}" for k, name in enumerate(functions)]
        with worker(*names, weights=weights) as summed, pytest.raises(RewardError, match="in its weighted sum"):
            summed.rewards(["query"], ["text"], {})
    with worker("fixed?value=1e15") as largest:
        assert largest.rewards(["query"], ["text"], {}) == [1e15]
