"""ROUGE as a reward: overlaps that can be counted by hand."""

import pytest

from cory_env.rewarding.worker import RewardWorker
from cory_env.rewards.rouge import overlap


def test_the_longest_common_sequence_is_counted_by_hand() -> None:
    # "the cat ... mat" of 3 and of 6 words share 3 in order: precision 1, recall 1/2, F = 2/3.
    assert overlap(["the cat mat"], ["the cat sat on the mat"]) == pytest.approx([2 / 3])
    assert overlap(["mat cat the"], ["the cat sat on the mat"]) == pytest.approx([4 / 9])  # "cat the" in order


def test_words_are_stemmed_and_nothing_in_common_is_zero() -> None:
    assert overlap(["Cats are running", "dog", ""], ["cat are run", "a cat", "a cat"]) == [1.0, 0.0, 0.0]


def test_of_several_references_the_best_counts() -> None:
    assert overlap(["a film"], [["something else", "a film"]]) == [1.0]


def test_a_measure_is_named_in_the_reward_s_name() -> None:
    name = "cory_env.rewards.rouge:overlap?measure=rouge2"
    with RewardWorker(name, timeout=60) as worker:
        # Bigrams: "the cat", "cat sat" against "the cat", "cat ran": one of two on either side.
        assert worker.rewards(["?"], ["the cat sat"], {"summary": ["the cat ran"]}) == pytest.approx([0.5])


def test_a_row_without_a_reference_and_an_unknown_measure_are_refused() -> None:
    for reference in (" ", None, {"text": "a"}, ["a", None], []):
        with pytest.raises(ValueError, match=r"summary holds .*, but ROUGE compares with a text"):
            overlap(["a"], [reference])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="no measure 'rouge9'"):
        overlap(["a"], ["a"], measure="rouge9")
