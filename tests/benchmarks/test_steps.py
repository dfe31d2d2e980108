"""Steps of several runs are split into what they have in common and each one's luck."""

import numpy as np
import pytest

from benchmarks.steps import accounts


def test_steps_of_one_llm_are_split_by_hand_computed_numbers() -> None:
    results = accounts([[np.array([3.0, 1.0])], [np.array([3.0, -1.0])]])
    assert results == pytest.approx({"common": 9.0 - 2.0 / 2, "noise": 2.0})  # of their mean (3, 0)


def test_of_several_llms_it_is_their_mean_that_counts_and_how_far_they_are_from_it() -> None:
    results = accounts([[np.array([3.0, 2.0]), np.array([3.0, 0.0])], [np.array([3.0, -1.0]), np.array([3.0, -1.0])]])
    assert results == pytest.approx({"common": 9.0 - 2.0 / 2, "noise": 2.0, "apart": 0.5})
