"""Figures of a probe, against numbers computed by hand, all orders of samples, and known probabilities."""

import math
from itertools import permutations

import numpy as np
import pytest

from launch.probing.figures import (
    NO_ANSWER,
    Outcomes,
    Ratio,
    SecondAnswers,
    best_of,
    best_of_tokens,
    compute_figures,
    ratio_cis,
    share_bounds,
    strategies,
    vote,
)

# Two queries with three samples. Query 0: right, wrong, wrong. Query 1: right, right, wrong.
RIGHT = np.array([[1, 0, 0], [1, 1, 0]], bool)
LENGTH = np.array([[10, 20, 30], [10, 10, 40]], float)
ANSWERS = np.array([[0, 1, 1], [0, 0, NO_ANSWER]])
PLAIN = SecondAnswers(np.array([[1, 0, 0], [1, 0, 0]], bool), np.full((2, 3), 5.0))
FEEDBACK = SecondAnswers(np.array([[1, 1, 0], [0, 1, 1]], bool), np.full((2, 3), 8.0))
WITH_FEEDBACK = Outcomes(RIGHT, LENGTH, ANSWERS, PLAIN, RIGHT, FEEDBACK)


def simulate(
    queries: int, samples: int, p2: float, p2_feedback: float, keeps: float = 0.8, seed: int = 0
) -> tuple[Outcomes, dict[str, float]]:
    """Draws outcomes of queries with Beta(2, 2) distributed difficulty, and returns them with the true figures."""
    random = np.random.default_rng(seed)
    shape = (queries, samples)
    right = random.random(shape) < random.beta(2, 2, size=(queries, 1))

    def second(repaired: float) -> SecondAnswers:
        return SecondAnswers(random.random(shape) < np.where(right, keeps, repaired), np.full(shape, 10.0))

    outcomes = Outcomes(right, np.full(shape, 10.0), right.astype(int), second(p2), right, second(p2_feedback))
    variance = 0.25 / 5  # of Beta(2, 2)
    again = (0.25 - variance) / 0.5
    truth = {"p1": 0.5, "p1_again": again, "p2": p2, "p2_feedback": p2_feedback, "p2_feedback - p2": p2_feedback - p2}
    truth |= {"kept": keeps, "p2 - p1_again": p2 - again, "p2_feedback - p1_again": p2_feedback - again}
    return outcomes, truth | {"chain_feedback": 0.5 + 0.5 * p2_feedback, "best_of_2": 0.5 + 0.5 * again}


def test_shares_equal_those_counted_by_hand() -> None:
    means = {name: figure.estimate.mean for name, figure in compute_figures(WITH_FEEDBACK).items()}
    assert means["p1"] == pytest.approx((1 / 3 + 2 / 3) / 2)
    # Wrong first answers: two of query 0, whose other samples are right in 1 of 2; one of query 1: 2 of 2.
    assert means["p1_again"] == pytest.approx((0.5 + 0.5 + 1) / 3)
    assert [means["p2"], means["p2_feedback"]] == pytest.approx([0, 2 / 3])
    assert [means["kept"], means["kept_feedback"]] == pytest.approx([2 / 3, 2 / 3])
    assert means["p2_feedback - p1_again"] == pytest.approx(0) and means["p2 - p1_again"] == pytest.approx(-2 / 3)
    assert (means["wrongly_accepted"], means["not_accepted"]) == (0, 0)


def test_strategies_equal_those_counted_by_hand() -> None:
    by_name = strategies(WITH_FEEDBACK)
    np.testing.assert_allclose(by_name["chain"].score, [1 / 3, 1 / 3])
    np.testing.assert_allclose(by_name["chain"].tokens, [25, 25])
    np.testing.assert_allclose(by_name["chain_stop"].score, [1 / 3, 2 / 3])
    np.testing.assert_allclose(by_name["chain_feedback"].score, [2 / 3, 1])
    np.testing.assert_allclose(by_name["chain_feedback"].tokens, [20 + 16 / 3, 20 + 8 / 3])


def test_errors_of_the_check_are_counted_and_change_the_chain() -> None:
    accepted = np.array([[0, 1, 0], [1, 1, 1]], bool)  # misses a right answer, accepts two wrong ones
    outcomes = WITH_FEEDBACK._replace(accepted=accepted)
    means = {name: figure.estimate.mean for name, figure in compute_figures(outcomes).items()}
    assert [means["wrongly_accepted"], means["not_accepted"]] == pytest.approx([2 / 4, 1 / 3])
    np.testing.assert_allclose(strategies(outcomes)["chain_feedback"].score, [1 / 3, 2 / 3])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_best_of_n_equals_the_mean_over_all_orders_of_the_samples(n: int) -> None:
    random = np.random.default_rng(n)
    right, accepted = random.random((2, 6, 5)) < 0.4
    length = random.integers(1, 9, (6, 5)).astype(float)
    second = SecondAnswers(right, length)
    score, tokens = best_of(Outcomes(right, length, np.zeros((6, 5), int), second, accepted, second), n)
    for query in range(6):
        scores, costs = [], []
        for order in permutations(range(5)):
            drawn = [*order[:n]]
            stop = next((index for index, sample in enumerate(drawn) if accepted[query, sample]), n - 1)
            scores.append(right[query, drawn[stop]])
            costs.append(length[query, drawn[: stop + 1]].sum())
        assert score[query] == pytest.approx(np.mean(scores)) and tokens[query] == pytest.approx(np.mean(costs))


def test_best_of_n_is_interpolated_to_a_number_of_tokens() -> None:
    one, two, three = (best_of(WITH_FEEDBACK, n) for n in (1, 2, 3))
    middle = best_of_tokens(WITH_FEEDBACK, float(one.tokens.mean() + two.tokens.mean()) / 2)
    np.testing.assert_allclose(middle.score, (one.score + two.score) / 2)
    assert middle.tokens.mean() == pytest.approx((one.tokens.mean() + two.tokens.mean()) / 2)
    np.testing.assert_allclose(best_of_tokens(WITH_FEEDBACK, 1.0).score, one.score)
    np.testing.assert_allclose(best_of_tokens(WITH_FEEDBACK, 1000.0).score, three.score)


def test_a_vote_needs_two_equal_answers_and_ignores_what_cannot_be_compared() -> None:
    answers = np.array([[0, 1, 1], [0, 1, 2], [NO_ANSWER, NO_ANSWER, 3], [NO_ANSWER] * 3, [0, 0, 1]])
    right = np.array([[1, 0, 0], [1, 0, 0], [0, 0, 1], [0, 0, 0], [1, 1, 0]], bool)
    assert vote(answers, right) == pytest.approx([0, 1 / 3, 1, 0, 1])
    assert vote(np.array([[0, 0, 1, 1]]), np.array([[1, 1, 0, 0]], bool)) == pytest.approx([0.5])
    assert vote(answers[1:4], right[1:4]) is None  # nothing to count


def test_the_vote_is_left_out_if_no_answers_are_equal() -> None:
    assert "vote_of_3" in strategies(WITH_FEEDBACK)
    different = WITH_FEEDBACK._replace(answers=np.array([[0, 1, 2], [NO_ANSWER, NO_ANSWER, 0]]))
    assert "vote_of_3" not in strategies(different)
    assert "chain - vote_of_3" not in compute_figures(different)


def test_without_feedback_the_reward_checks_best_of_n_and_no_chain_stops() -> None:
    figures = compute_figures(WITH_FEEDBACK._replace(accepted=None, second_feedback=None))
    assert figures["best_of_3"].estimate.mean == 1
    assert not [name for name in figures if "feedback" in name or "stop" in name or "accepted" in name]
    assert figures["chain"].tokens == 25 and figures["p1"].tokens is None


def test_with_an_exact_check_the_formulas_hold_exactly() -> None:
    outcomes, _ = simulate(200, 4, p2=0.1, p2_feedback=0.6)
    means = {name: figure.estimate.mean for name, figure in compute_figures(outcomes).items()}
    p1 = means["p1"]
    assert means["chain_feedback"] == pytest.approx(p1 + (1 - p1) * means["p2_feedback"])
    assert means["best_of_2"] == pytest.approx(p1 + (1 - p1) * means["p1_again"])


SLOW_CASES = [pytest.param(*case, marks=pytest.mark.slow) for case in ((40, 0.2, 0.5), (200, 0.02, 0.3))]


@pytest.mark.parametrize(("queries", "p2", "p2_feedback"), [(60, 0.01, 0.03), *SLOW_CASES])
def test_intervals_cover_the_true_values(queries: int, p2: float, p2_feedback: float) -> None:
    trials = 100
    covered: dict[str, int] = {}
    for trial in range(trials):
        outcomes, truth = simulate(queries, 3, p2, p2_feedback, seed=trial)
        figures = compute_figures(outcomes, seed=trial)
        for name, value in truth.items():
            _, low, high, _ = figures[name].estimate
            covered[name] = covered.get(name, 0) + (low is not None and high is not None and low <= value <= high)
    assert all(count / trials >= 0.91 for count in covered.values()), covered
    assert np.mean([*covered.values()]) / trials < 0.99  # not simply too wide


def test_rare_events_get_intervals_of_proportions() -> None:
    ones = np.ones(20)
    nothing, everything, no_difference, gain, single, no_case = ratio_cis(
        {
            "nothing": Ratio(np.zeros(20), ones),
            "everything": Ratio(3 * ones, 3 * ones),
            "a - a": Ratio(np.zeros(20), ones),
            "a - b": Ratio(np.eye(20)[0], ones),
            "single": Ratio(np.eye(20)[0], np.eye(20)[0]),
            "no case": Ratio(np.zeros(20), np.zeros(20)),
        }
    ).values()
    bound = 1.959964**2 / (20 + 1.959964**2)  # Wilson's upper bound of 0 of 20
    assert nothing == pytest.approx((0, 0, bound, 20)) and everything == pytest.approx((1, 1 - bound, 1, 20))
    assert no_difference == pytest.approx((0, -bound, bound, 20))
    # Wilson's interval of 1 of 20 is [0.0089, 0.2361]; of the losses, 0 of 20
    assert gain == pytest.approx((0.05, 0.05 - math.hypot(0.05 - 0.00888, bound), 0.2361, 20), abs=1e-4)
    assert single == pytest.approx((1, 1 - 1.959964**2 / (1 + 1.959964**2), 1, 1))
    assert math.isnan(no_case.mean) and no_case.n == 0


def test_samples_of_a_query_count_as_far_as_they_differ() -> None:
    spread = Ratio(np.r_[np.ones(4), np.zeros(16)], np.full(20, 4.0))  # 4 of 80 cases, in 4 queries
    clustered = Ratio(np.r_[4.0, np.zeros(19)], np.full(20, 4.0))  # 4 of 80 cases, all of one query
    assert share_bounds(spread) == pytest.approx((0.0196, 0.1216), abs=1e-4)  # of 4 of 80
    assert share_bounds(clustered) == pytest.approx((0.0089, 0.2361), abs=1e-4)  # of 1 of 20


@pytest.mark.parametrize(
    ("queries", "samples", "difficulty", "weak", "wrong", "noticed"),
    [
        (40, 8, (0.5, 3.0), 0.1, 1.0, 0.5),
        (40, 3, (2.0, 2.0), 0.1, 1.0, 0.5),
        (100, 8, (0.3, 0.3), 0.1, 1.0, 0.5),
        (40, 8, (0.5, 3.0), 0.3, 0.3, 1.0),
        (100, 3, (2.0, 2.0), 1.0, 0.05, 1.0),
    ],
)
def test_the_interval_of_wrongly_accepted_answers_covers_the_true_share_if_few_queries_have_them(
    queries: int, samples: int, difficulty: tuple[float, float], weak: float, wrong: float, noticed: float
) -> None:
    """The check accepts right answers with the probability `noticed`, wrong ones to a share `weak` of queries."""
    random = np.random.default_rng(1)

    def accepted_answers(queries: int) -> Ratio:
        right = random.random((queries, samples)) < random.beta(*difficulty, size=(queries, 1))
        is_weak = random.random((queries, 1)) < weak
        accepts = random.random((queries, samples)) < np.where(right, noticed, wrong * is_weak)
        return Ratio((~right & accepts).sum(1).astype(float), accepts.sum(1).astype(float))

    truth = accepted_answers(400_000).mean
    bounds = [share_bounds(accepted_answers(queries)) for _ in range(2000)]
    assert 0.91 <= np.mean([low <= truth <= high for low, high in bounds]) <= 0.99
