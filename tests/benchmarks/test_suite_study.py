"""The study of reasoning-gym's sets: reading answers, choosing sets, and figures with p-values by set."""

import pytest

from benchmarks.suite.analysis import ALL, choose_sets, correct, summarise, table
from benchmarks.suite.answers import read_answer
from launch.probing.sampler import Answer, ProbedSample


@pytest.mark.parametrize(
    ("completion", "right", "answer"),
    [
        ("28 + 48 = 76.", "76", "76"),
        ("The answer is -3, not 4.\n5", -4, "4"),
        ("No, it does not follow that all fish are animals.", "Yes", "No"),
        ("It is true.", "False", "True"),
        ('"tsun".', "nust", "tsun"),
        ("no number", "7", "no number"),
        ("", "7", ""),
    ],
)
def test_read_answer_looks_for_the_kind_of_the_right_answer(completion: str, right: object, answer: str) -> None:
    assert read_answer(completion, right) == answer


def test_sets_are_chosen_by_their_share_of_right_answers() -> None:
    shares = {"hopeless": 0, "hard": 1, "fair": 16, "easy": 17}
    answers = [
        {"set": name, "score": 1.0 if index < right else 0.9} for name, right in shares.items() for index in range(20)
    ]
    assert choose_sets(answers) == ["fair", "hard"]


def sample(query: int, number: int, first: bool, second: bool, second_feedback: bool) -> ProbedSample:
    """Returns a sample whose answers are right or wrong, and whose feedback knows it."""

    def answer(is_right: bool) -> Answer:
        return Answer(text="x", length=2, task_reward=float(is_right), ended=True)

    return ProbedSample(
        temperature=1.0,
        query=query,
        sample=number,
        first=answer(first),
        second=answer(second),
        feedback=None if first else "This answer is wrong.",
        second_feedback=answer(second_feedback),
    )


def test_figures_and_p_values_are_by_set_and_corrected_by_the_number_of_sets() -> None:
    # `repaired`: one of three samples is right, and feedback repairs each wrong one. `same`: a second agent repeats it.
    queries = [{"set": "repaired" if index < 8 else "same", "answer": str(index % 2)} for index in range(16)]
    samples = [
        sample(query, number, number == 0, number == 0, number == 0 or query < 8)
        for query in range(16)
        for number in range(3)
    ]
    results = summarise([*samples, sample(16, 0, True, True, True)], [*queries, queries[-1]])  # the last is incomplete
    repaired, same = results["repaired"], results["same"]
    assert (repaired.queries, repaired.right_answers) == (8, 2)
    assert results[ALL].queries == repaired.queries + same.queries
    assert repaired.figures["p1"].estimate.mean == pytest.approx(1 / 3)
    assert repaired.figures["p2_feedback - p1_again"].estimate.mean == pytest.approx(1 - 1 / 2)
    assert same.figures["p2_feedback - p1_again"].estimate.mean == pytest.approx(-1 / 2)
    name = "p2_feedback - p1_again"
    assert repaired.ps[name] == same.ps[name] == pytest.approx(2 / 2**8)  # all differences have the same sign
    assert correct(results)[name] == pytest.approx({"repaired": 4 / 2**8, "same": 4 / 2**8})
    assert len(table(results)) == 2 + len(results)
