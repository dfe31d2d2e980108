"""Several reward functions that make one reward."""

import pickle

import pytest

from cory_env.episode import ChainEpisode
from cory_env.functions import SpecError
from cory_env.rewarding.episodes import reward_episodes
from cory_env.rewarding.process import Reward
from cory_env.rewarding.spec import parse_sum, short_names, weighted_sum
from cory_env.rewarding.worker import RewardError, RewardWorker
from tests.cory_env.sample_tasks import QUERIES, chain, response

HERE = "tests.cory_env.sample_rewards:"
GOOD = ["a", "bb", "ccc"]


def worker(*functions: str, weights: list[float] | None = None, **settings: str) -> RewardWorker:
    return RewardWorker(weighted_sum([HERE + name for name in functions], weights), timeout=20, **settings)  # type: ignore[arg-type]


def test_the_reward_is_the_weighted_sum_and_knows_its_parts() -> None:
    with worker("length", "fixed?value=4", weights=[1.0, -0.5]) as several:
        rewards = several.rewards(["query"] * 3, GOOD, {})
        assert several.rewards(["query"], ["four"], {}) == [2.0]
    assert rewards == [-1.0, 0.0, 1.0]
    assert [getattr(reward, "parts", None) for reward in rewards] == [
        {"length": n, "fixed": 4.0} for n in (1.0, 2.0, 3.0)
    ]
    kept = pickle.loads(pickle.dumps(rewards[2]))
    assert kept == 1.0 and isinstance(kept, Reward) and kept.parts == {"length": 3.0, "fixed": 4.0}


def test_without_weights_each_counts_once_and_a_single_one_is_as_ever() -> None:
    with worker("length", "brevity") as several:
        assert several.rewards(["query"] * 2, GOOD[:2], {}) == [0.5, 1.0]
    assert weighted_sum([HERE + "length"]) == HERE + "length"
    with worker("length", weights=[0.5]) as one:
        assert one.rewards(["query"] * 2, GOOD[:2], {}) == [0.5, 1.0]


def test_each_gets_the_columns_that_it_accepts_and_what_any_needs_is_known() -> None:
    with worker("with_column", "count_columns") as several:
        assert several.rewards(["query"] * 2, ["4", "5"], {"answer": ["4", "4"], "other": [1, 2]}) == [4.0, 3.0]
        assert several.start() == ("completions", "answer")


def test_parts_reach_the_rewards_of_episodes() -> None:
    episode = ChainEpisode(chain(2), QUERIES[0])
    for text in (" good", " a very good film"):
        episode.respond(response(text))
    with worker("length", "observer_bonus", weights=[0.0, 2.0]) as several:
        (rewards,) = reward_episodes(several, [episode])
    assert rewards == [0.0, 2.0]
    assert [reward.parts["observer_bonus"] for reward in rewards if isinstance(reward, Reward)] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("raises", rf"sample 1 of 3.*it asks {HERE}raises, which raised RuntimeError"),
        (
            "returns_none",
            rf"sample 1 of 3.*it asks {HERE}returns_none, which returned None .* instead of a finite",
        ),
        ("inserts", rf"it asks {HERE}inserts, which returned \d values"),
    ],
)
def test_what_fails_is_named(function: str, says: str) -> None:
    texts = ["a", "bad", "ccc"]
    with worker("length", function) as several, pytest.raises(RewardError, match=says):
        several.rewards(["query"] * 3, texts, {})
    if function == "inserts":
        return
    with worker("length", function, on_error="skip") as several:
        rewards = several.rewards(["query"] * 3, texts, {})
        assert several.skipped == 1
    assert rewards[1] is None and isinstance(rewards[2], Reward) and rewards[2].parts["length"] == 3.0


def test_one_that_cannot_be_loaded_or_called_refuses_them_all() -> None:
    with worker("length", "no_such") as several, pytest.raises(RewardError, match="no function 'no_such'"):
        several.start()
    with (
        worker("length", "with_column") as several,
        pytest.raises(RewardError, match=f"cannot be used: it asks {HERE}with_column, which asks for answer"),
    ):
        several.rewards(["query"], ["x"], {})


def test_names_are_short_where_they_differ() -> None:
    assert short_names(["a:f", "b:g?x=1"]) == ["f", "g"]
    assert short_names(["a:f", "b:f", "b:g"]) == ["a:f", "b:f", "g"]


def test_sums_are_read_back_and_wrong_ones_are_explained() -> None:
    specs, weights = ["a:f?x=1", "b.c:g"], [1e-05, -2.0]
    assert parse_sum(weighted_sum(specs, weights)) == list(zip(specs, weights, strict=True))
    for weights in ([1.0], [1.0, 1.0, 1.0]):
        with pytest.raises(SpecError, match=rf"2 reward functions and {len(weights)} reward_weights"):
            weighted_sum(specs, weights)
    for wrong, message in (("a:f + a:f", "twice"), ("x * a:f", "no number"), ("a:f + b", "Write module:function")):
        with pytest.raises(SpecError, match=message):
            parse_sum(wrong)
