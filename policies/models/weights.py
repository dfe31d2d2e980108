"""A policy's weights on their way from learner to engine."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping

import numpy as np

Weights = Mapping[str, np.ndarray]
"""fp32 arrays by Hugging Face parameter name; tied weights appear once."""
Shape = tuple[int, ...]


class LazyWeights(Mapping[str, np.ndarray]):
    """Weights of which each is made when it is asked for, and not kept: so one at a time is in memory."""

    def __init__(self, shapes: Mapping[str, Shape], make: Callable[[str], np.ndarray]) -> None:
        """Takes the shapes, by name, and what makes an array of a name, which nobody else may write to."""
        self.shapes = shapes
        self._make = make

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.shapes:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def shapes(weights: Weights) -> Mapping[str, Shape]:
    """The shapes of weights, by name; of lazy ones without making any."""
    return (
        weights.shapes if isinstance(weights, LazyWeights) else {name: array.shape for name, array in weights.items()}
    )


def checksum(weights: Weights) -> int:
    """CRC-32 over names and fp32 values, in sorted order of the names."""
    total = 0
    for name in sorted(weights):
        total = extend(total, name, weights[name])
    return total


def extend(total: int, name: str, array: np.ndarray) -> int:
    """The checksum of weights with one more, whose name is after those of the others."""
    return zlib.crc32(np.ascontiguousarray(array, dtype=np.float32).data, zlib.crc32(name.encode(), total))
