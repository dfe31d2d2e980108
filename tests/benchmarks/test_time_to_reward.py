"""What is made of the curves of two sides."""

from __future__ import annotations

import pytest

from benchmarks.time_to_reward import FILMS, Curve, compare

SLOW = [(0, 20.0, 0.0), (5, 70.0, 0.1), (10, 120.0, 0.3), (15, 170.0, 0.5)]
QUICK = [(0, 40.0, 0.0), (5, 60.0, 0.4), (10, 80.0, 0.5)]


@pytest.mark.parametrize(
    ("level", "seconds"), [(0.1, 70.0), (0.2, 95.0), (0.5, 170.0), (0.6, float("inf")), (-1.0, 20.0)]
)
def test_a_level_is_reached_where_a_line_through_the_points_meets_it(level: float, seconds: float) -> None:
    assert Curve(SLOW, 200.0).seconds_to(level) == pytest.approx(seconds)


def test_the_first_time_counts_though_the_reward_falls_again() -> None:
    falling = [(0, 10.0, 0.0), (5, 20.0, 0.4), (10, 30.0, 0.1), (15, 40.0, 0.5)]
    assert Curve(falling, 50.0).seconds_to(0.3) == pytest.approx(17.5)


def test_ours_is_compared_with_the_best_of_theirs_in_the_same_round() -> None:
    curves = {
        "TRL RLOO": [Curve(SLOW, 200.0), Curve(SLOW, 400.0)],
        "TRL GRPO": [Curve(SLOW, 300.0), Curve(QUICK, 90.0)],
        "ours, imdb-tiny": [Curve(QUICK, 100.0)] * 2,
        "ours, RLOO": [Curve(QUICK, 50.0)] * 2,
        "ours, RLOO, old_logprobs=sampler": [Curve(QUICK, 40.0)] * 2,
        "ours, PPO": [Curve([(0, 40.0, 0.0), (10, 80.0, 0.1)], 100.0)] * 2,
    }
    results = {figure.label: figure for figure in compare(FILMS, curves)}
    assert results["imdb-tiny: whole command, sooner than TRL's best"].runs == (2.0, 0.9)
    assert results["RLOO: whole command, sooner than TRL's RLOO"].runs == (4.0, 8.0)
    assert results["RLOO, old_logprobs=sampler: whole command, sooner than TRL's RLOO"].runs == (5.0, 10.0)
    assert results["RLOO: until 0.2, sooner than TRL's RLOO"].runs == (95.0 / 50.0, 95.0 / 50.0)
    assert results["PPO: until 0.2, sooner than TRL's best"].value == 0.0  # it never got there
    assert results["TRL RLOO: reward of its last two evaluations"].value == pytest.approx(0.4)
