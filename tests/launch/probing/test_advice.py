"""What a probe advises, from the figures of simulated models."""

import numpy as np
import pytest

from launch.display.statistics import Estimate
from launch.display.tables import print_tables
from launch.probing.advice import advise, best_temperature, format_percent
from launch.probing.figures import Outcomes, SecondAnswers, compute_figures
from launch.probing.tables import probe_tables, text_lines
from tests.launch.probing.test_figures import simulate


def advice_of(outcomes: Outcomes) -> tuple[str, str]:
    _, choice, text = advise({1.0: compute_figures(outcomes)})
    return choice, text


def without_feedback(outcomes: Outcomes) -> Outcomes:
    return outcomes._replace(accepted=None, second_feedback=None)


def test_feedback_that_repairs_more_than_a_second_sample_pays() -> None:
    choice, text = advice_of(simulate(300, 4, p2=0.1, p2_feedback=0.7)[0])
    assert choice == "chain with feedback" and text.startswith(
        "Train a chain with feedback: it repairs 69 % [65, 73] of"
    )


def test_a_chain_without_feedback_is_advised_only_if_the_one_with_feedback_does_not_pay() -> None:
    assert advice_of(simulate(300, 4, p2=0.7, p2_feedback=0.7)[0])[0] == "chain with feedback"
    assert advice_of(simulate(300, 4, p2=0.7, p2_feedback=0.1)[0])[0] == "chain without feedback"


def test_a_second_sample_that_is_better_than_both_chains_advises_best_of_n() -> None:
    choice, text = advice_of(simulate(300, 4, p2=0.05, p2_feedback=0.1)[0])
    assert choice == "single agent" and "best-of-n" in text


def test_overlapping_intervals_decide_nothing_and_say_how_many_queries_would() -> None:
    choice, text = advice_of(simulate(40, 4, p2=0.1, p2_feedback=0.45)[0])
    assert choice == "nothing" and text.startswith("Nothing can be said at 40 queries about a chain with feedback")
    assert "queries would decide" in text


def test_repairs_that_cost_too_many_tokens_are_not_advised() -> None:
    outcomes, _ = simulate(300, 4, p2=0.1, p2_feedback=0.6)
    assert outcomes.second_feedback is not None
    long = outcomes.second_feedback._replace(length=np.full(outcomes.right.shape, 100.0))
    assert advice_of(outcomes)[0] == "chain with feedback"
    assert advice_of(outcomes._replace(second_feedback=long))[0] == "single agent"


@pytest.mark.parametrize(
    ("p2", "keeps", "choice"),
    [(0.6, 0.95, "chain without feedback"), (0.1, 0.5, "single agent"), (0.3, 0.7, "nothing")],
)
def test_without_feedback_the_second_answer_is_compared_with_the_first(p2: float, keeps: float, choice: str) -> None:
    outcomes = without_feedback(simulate(300, 4, p2, 0.0, keeps)[0])
    # All answers differ: no vote
    outcomes = outcomes._replace(answers=np.broadcast_to(np.arange(4), outcomes.right.shape))
    assert advice_of(outcomes)[0] == choice


def test_without_feedback_a_vote_is_a_rival_of_the_chain() -> None:
    outcomes = without_feedback(simulate(300, 4, 0.12, 0.0, 0.97)[0])
    distinct = np.where(outcomes.right, 0, np.arange(1, 5))  # wrong answers never agree, so a vote is strong
    choice, text = advice_of(outcomes._replace(answers=distinct))
    assert choice == "single agent" and "vote" in text


def test_a_model_without_wrong_answers_leaves_nothing_to_repair() -> None:
    right = np.ones((5, 3), bool)
    second = SecondAnswers(right, np.ones((5, 3)))
    choice, text = advice_of(Outcomes(right, np.ones((5, 3)), np.zeros((5, 3), int), second))
    assert choice == "nothing" and text == "Nothing to repair: all first answers are right (temperature 1)."


def test_the_best_temperature_is_that_of_the_best_single_agent() -> None:
    weak, strong = (compute_figures(simulate(100, 3, 0.1, p2, seed=seed)[0]) for p2, seed in ((0.9, 1), (0.1, 2)))
    name = "best_of_2"
    better = 0.7 if weak[name].estimate.mean > strong[name].estimate.mean else 1.3
    assert best_temperature({0.7: weak, 1.3: strong}, name) == better
    assert best_temperature({1.3: weak, 0.7: weak}, name) == 0.7


def test_percentages_have_a_decimal_if_they_are_small() -> None:
    assert format_percent(Estimate(0.543, 0.5, 0.6, 9)) == "54 [50, 60]"
    assert format_percent(Estimate(0.012, -0.001, 0.03, 9), signed=True) == "+1.2 [-0.1, +3.0]"
    assert format_percent(Estimate(float("nan"), None, None, 0)) == "-"


def test_three_temperatures_fit_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    figures = {t: compute_figures(simulate(300, 4, 0.02, 0.53, seed=int(10 * t))[0]) for t in (0.7, 1.0, 1.3)}
    print_tables(sys.stdout, *probe_tables(figures, 1.0))
    print(*text_lines(figures, advise(figures), has_check=True), sep="\n")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 25 and max(map(len, lines)) <= 80


def test_a_vote_that_is_possible_at_one_temperature_only_has_no_row() -> None:
    outcomes, _ = simulate(20, 3, 0.2, 0.5)
    different = outcomes._replace(answers=np.tile(np.arange(3), (20, 1)))
    figures = {0.7: compute_figures(outcomes), 1.3: compute_figures(different)}
    assert "vote_of_3" in figures[0.7] and "vote_of_3" not in figures[1.3]
    rows = [str(cell) for table in probe_tables(figures, 1.0) for cell in table.columns[0].cells]
    assert "best of 3" in rows and "vote of 3" not in rows
