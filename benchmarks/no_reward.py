"""A reward that costs nothing, for benchmarks that do not measure rewards."""

from __future__ import annotations


def zero(completions: list[str]) -> list[float]:
    """Zero for each."""
    return [0.0] * len(completions)
