"""Sampling an update's queries. They depend only on the seed, the update, and the number of queries that dynamic
sampling used before it, so a resumed run samples the same ones.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

import numpy as np


class PromptRef(NamedTuple):
    """A reference to a query, by its index in the split, and to one of the chains that answer it."""

    query: int
    sample: int = 0


def sample_prompts(seed: int, update: int, size: int, total: int, samples: int = 1, used: int = 0) -> list[PromptRef]:
    """Returns the queries of one update: the next `size` of an endless sequence of shuffled epochs.

    Args:
        update: counted from 0.
        used: queries of the sequence that replacements in earlier updates used.
    """
    prompt_refs: list[PromptRef] = []
    num_samples: dict[int, int] = {}  # by query: at an epoch boundary, an update may contain a query twice
    for index in range(update * size + used, (update + 1) * size + used):
        query = query_at(seed, index, total)
        first = num_samples.get(query, 0)
        num_samples[query] = first + samples
        prompt_refs += [PromptRef(query, sample) for sample in range(first, first + samples)]
    return prompt_refs


def sample_replacements(
    seed: int, first: int, count: int, total: int, excluded: Collection[int]
) -> tuple[list[int], int]:
    """Returns the next queries of the sequence that an update does not contain yet.

    Returns:
        The queries, fewer than `count` if there are no others; and the number of queries of the sequence used.
    """
    queries: list[int] = []
    used = 0
    while len(queries) < min(count, total - len(excluded)):
        query = query_at(seed, first + used, total)
        used += 1
        if query not in excluded and query not in queries:
            queries.append(query)
    return queries, used


def query_at(seed: int, index: int, total: int) -> int:
    """Returns the query at an index of the endless sequence of shuffled epochs."""
    epoch, offset = divmod(index, total)
    return int(query_order(seed, epoch, total)[offset])


@lru_cache(maxsize=2)
def query_order(seed: int, epoch: int, total: int) -> np.ndarray:
    """Returns the order of the training queries in one epoch: a permutation drawn from (seed, epoch)."""
    return np.random.default_rng([seed, epoch]).permutation(total)
