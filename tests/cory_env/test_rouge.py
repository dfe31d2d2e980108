"""ROUGE as a reward, compared with overlaps counted by hand."""

import pytest

from cory_env.rewarding.worker import RewardWorker
from cory_env.rewards.rouge import overlap


def test_rouge_l_matches_a_count_by_hand() -> None:
    # Texts of 3 and 6 words share 3 words in order: precision 1, recall 1/2, F = 2/3.
    assert overlap(["the cat mat"], ["the cat sat on the mat"]) == pytest.approx([2 / 3])
    assert overlap(["mat cat the"], ["the cat sat on the mat"]) == pytest.approx([4 / 9])  # "cat the" in order


def test_words_are_stemmed_and_no_overlap_gives_zero() -> None:
    assert overlap(["Cats are running", "dog", ""], ["cat are run", "a cat", "a cat"]) == [1.0, 0.0, 0.0]


def test_the_best_of_several_references_counts() -> None:
    assert overlap(["a film"], [["something else", "a film"]]) == [1.0]


def test_the_measure_is_set_in_the_reward_s_name() -> None:
    name = "cory_env.rewards.rouge:overlap?measure=rouge2"
    with RewardWorker(name, timeout=60) as worker:
        # Bigrams: "the cat", "cat sat" against "the cat", "cat ran": one of two on either side.
        assert worker.rewards(["?"], ["the cat sat"], {"summary": ["the cat ran"]}) == pytest.approx([0.5])


def test_a_missing_reference_and_an_unknown_measure_are_rejected() -> None:
    for reference in (" ", None, {"text": "a"}, ["a", None], []):
        with pytest.raises(ValueError, match=r"summary contains .*, but must be a text"):
            overlap(["a"], [reference])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="Unknown ROUGE measure 'rouge9'"):
        overlap(["a"], ["a"], measure="rouge9")
