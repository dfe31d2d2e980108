"""A policy's weights on their way from learner to engine."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np

Weights = Mapping[str, np.ndarray]
"""fp32 arrays by Hugging Face parameter name; tied weights appear once."""


def checksum(weights: Weights) -> int:
    """CRC-32 over names and fp32 values, in sorted order of the names."""
    total = 0
    for name in sorted(weights):
        total = extend(total, name, weights[name])
    return total


def extend(total: int, name: str, array: np.ndarray) -> int:
    """The checksum of weights with one more, whose name is after those of the others."""
    return zlib.crc32(np.ascontiguousarray(array, dtype=np.float32).data, zlib.crc32(name.encode(), total))
