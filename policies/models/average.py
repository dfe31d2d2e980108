"""The mean of LLMs that started from one base, from weights as checkpoints hold them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from policies.models.lora import Lora
from policies.models.weights import Weights


def mean_weights(llms: Iterable[Weights]) -> dict[str, np.ndarray]:
    """Returns the mean of the weights of LLMs, of which no more than one is read at a time."""
    total: dict[str, np.ndarray] = {}
    count = 0
    for weights in llms:
        count += 1
        for name, array in weights.items():
            total[name] = array + total[name] if name in total else np.array(array)
    return {name: array / np.float32(count) for name, array in total.items()}


def stacked(adapters: Sequence[Weights]) -> dict[str, np.ndarray]:
    """Returns the adapter whose product is the mean of the products B A of several, exactly.

    The mean of the factors has another product, where the adapters' A differ. This one has all of their rows of A, one
    below the other, and columns of B, each divided by the number of adapters: so its rank is the sum of theirs. It
    belongs to `stacked_lora`.
    """
    made: dict[str, np.ndarray] = {}
    for name in adapters[0]:
        factors = [np.array(adapter[name]) for adapter in adapters]
        if ".lora_A." in name:
            made[name] = np.concatenate(factors, axis=0)
        else:
            made[name] = np.concatenate(factors, axis=1) / np.float32(len(adapters))
    return made


def stacked_lora(lora: Lora, count: int) -> Lora:
    """Returns what the `stacked` adapter of `count` is like: of their scale, alpha / rank."""
    return lora._replace(rank=count * lora.rank, alpha=count * lora.alpha)


def scaled(adapter: Weights, step: float) -> dict[str, np.ndarray]:
    """Returns an adapter that is so many times as far away from its base."""
    return {
        name: np.array(array) * np.float32(step) if ".lora_B." in name else np.array(array)
        for name, array in adapter.items()
    }
