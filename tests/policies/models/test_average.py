"""The mean of LLMs, from stored weights."""

import numpy as np
import pytest

from policies.models.average import concat_lora, concat_lora_config, mean_weights
from policies.models.lora import Lora
from policies.models.weights import Weights

A, B = "layer.lora_A.default.weight", "layer.lora_B.default.weight"


def adapters(count: int) -> list[Weights]:
    random = np.random.default_rng(0)
    return [
        {A: random.normal(size=(4, 9)).astype(np.float32), B: random.normal(size=(7, 4)).astype(np.float32)}
        for _ in range(count)
    ]


def test_the_mean_of_weights_is_fp32_and_leaves_them_as_they_were() -> None:
    llms = [{"a": np.full(3, value, dtype=np.float32)} for value in (1.0, 2.0, 6.0)]
    found = mean_weights(llms)
    assert found["a"].tolist() == [3.0] * 3 and found["a"].dtype == np.float32
    assert [each["a"][0] for each in llms] == [1.0, 2.0, 6.0]


@pytest.mark.parametrize("count", [2, 3])
def test_a_stacked_adapter_adds_the_mean_of_what_the_adapters_add_which_the_mean_of_factors_does_not(
    count: int,
) -> None:
    several, lora = adapters(count), Lora(rank=4, alpha=6.0)
    made, like = concat_lora(several), concat_lora_config(lora, count)
    assert made[A].shape == (like.rank, 9) and made[B].shape == (7, like.rank)
    expected = np.mean([lora.alpha / lora.rank * each[B] @ each[A] for each in several], axis=0)
    np.testing.assert_allclose(like.alpha / like.rank * made[B] @ made[A], expected, rtol=1e-4, atol=1e-5)
    factors = mean_weights(several)
    assert np.abs(lora.alpha / lora.rank * factors[B] @ factors[A] - expected).max() > 0.1
