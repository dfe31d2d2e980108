"""Averages of policies' weights."""

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


def test_the_mean_of_weights_is_fp32_and_does_not_change_them() -> None:
    policies = [{"a": np.full(3, value, dtype=np.float32)} for value in (1.0, 2.0, 6.0)]
    mean = mean_weights(policies)
    assert mean["a"].tolist() == [3.0] * 3 and mean["a"].dtype == np.float32
    assert [weights["a"][0] for weights in policies] == [1.0, 2.0, 6.0]


@pytest.mark.parametrize("count", [2, 3])
def test_the_concatenated_adapter_has_the_mean_delta_while_the_mean_of_factors_has_not(count: int) -> None:
    several, lora = adapters(count), Lora(rank=4, alpha=6.0)
    concatenated, config = concat_lora(several), concat_lora_config(lora, count)
    assert concatenated[A].shape == (config.rank, 9) and concatenated[B].shape == (7, config.rank)
    expected = np.mean([lora.alpha / lora.rank * adapter[B] @ adapter[A] for adapter in several], axis=0)
    delta = config.alpha / config.rank * concatenated[B] @ concatenated[A]
    np.testing.assert_allclose(delta, expected, rtol=1e-4, atol=1e-5)
    factors = mean_weights(several)
    assert np.abs(lora.alpha / lora.rank * factors[B] @ factors[A] - expected).max() > 0.1
