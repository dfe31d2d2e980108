"""The mean of LLMs that started from one base, from weights as checkpoints hold them: one tensor after another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.models.lora import Lora
from policies.models.weights import LazyWeights, Weights, shapes


def mean_weights(llms: Sequence[Weights]) -> LazyWeights:
    """Returns the mean of the weights of LLMs."""

    def make(name: str) -> np.ndarray:
        total = np.array(llms[0][name])
        for weights in llms[1:]:
            total += weights[name]
        total /= np.float32(len(llms))
        return total

    return LazyWeights(shapes(llms[0]), make)


def concat_lora(adapters: Sequence[Weights]) -> LazyWeights:
    """Returns the adapter whose product is the mean of the products B A of several, exactly.

    The mean of the factors has another product, where the adapters' A differ. This one has all of their rows of A, one
    below the other, and columns of B, each divided by the number of adapters: so its rank is the sum of theirs. It
    belongs to `stacked_lora`.
    """
    count = len(adapters)

    def make(name: str) -> np.ndarray:
        factors = [adapter[name] for adapter in adapters]
        if ".lora_A." in name:
            return np.concatenate(factors, axis=0)
        return np.concatenate(factors, axis=1) / np.float32(count)

    stacked_shapes = {
        name: (count * rows, columns) if ".lora_A." in name else (rows, count * columns)
        for name, (rows, columns) in shapes(adapters[0]).items()
    }
    return LazyWeights(stacked_shapes, make)


def concat_lora_config(lora: Lora, count: int) -> Lora:
    """Returns what the `stacked` adapter of `count` is like: of their scale, alpha / rank."""
    return lora._replace(rank=count * lora.rank, alpha=count * lora.alpha)
