"""Average weights of policies that started from one base, computed lazily, one tensor at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.models.lora import Lora
from policies.models.weights import LazyWeights, Weights, weight_shapes


def mean_weights(policies: Sequence[Weights]) -> LazyWeights:
    """Returns the mean of the weights of several policies."""

    def make(name: str) -> np.ndarray:
        total = np.array(policies[0][name])
        for weights in policies[1:]:
            total += weights[name]
        total /= np.float32(len(policies))
        return total

    return LazyWeights(weight_shapes(policies[0]), make)


def concat_lora(adapters: Sequence[Weights]) -> LazyWeights:
    """Returns one adapter whose product B A is exactly the mean of the products of several adapters.

    (The mean of the factors has another product if the adapters' A differ.) Its A is the concatenation of all rows of
    A, its B the concatenation of all columns of B, divided by the number of adapters. Its rank is the sum of their
    ranks; its configuration is `concat_lora_config`.
    """
    count = len(adapters)

    def make(name: str) -> np.ndarray:
        factors = [adapter[name] for adapter in adapters]
        if ".lora_A." in name:
            return np.concatenate(factors, axis=0)
        return np.concatenate(factors, axis=1) / np.float32(count)

    concat_shapes = {
        name: (count * rows, columns) if ".lora_A." in name else (rows, count * columns)
        for name, (rows, columns) in weight_shapes(adapters[0]).items()
    }
    return LazyWeights(concat_shapes, make)


def concat_lora_config(lora: Lora, count: int) -> Lora:
    """Returns the configuration of `concat_lora` of `count` adapters, with the same scale alpha / rank."""
    return lora._replace(rank=count * lora.rank, alpha=count * lora.alpha)
