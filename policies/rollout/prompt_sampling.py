"""Sampling an update's queries. They depend only on (seed, update), so a resumed run samples the same ones."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np


class PromptRef(NamedTuple):
    """A reference to a query, and to one of the chains that answer it."""

    query: int
    """Its index in the split."""
    sample: int = 0
    """Which of the pioneer's responses to this query."""
    sibling: int = 0
    """Which of the chains that fork from the same response of the pioneer."""


def sample_prompts(seed: int, update: int, size: int, total: int, samples: int = 1) -> list[PromptRef]:
    """Returns the queries of one update: the next `size` of an endless sequence of shuffled epochs.

    Args:
        seed: of the run.
        update: counted from 0.
        size: queries per update.
        total: number of training queries.
        samples: pioneer responses per query.
    """
    prompt_refs: list[PromptRef] = []
    num_samples: dict[int, int] = {}  # by query: at an epoch boundary, an update may contain a query twice
    for index in range(update * size, (update + 1) * size):
        epoch, offset = divmod(index, total)
        query = int(query_order(seed, epoch, total)[offset])
        first = num_samples.get(query, 0)
        num_samples[query] = first + samples
        prompt_refs += [PromptRef(query, sample) for sample in range(first, first + samples)]
    return prompt_refs


@lru_cache(maxsize=2)
def query_order(seed: int, epoch: int, total: int) -> np.ndarray:
    """Returns the order of the training queries in one epoch: a permutation drawn from (seed, epoch)."""
    return np.random.default_rng([seed, epoch]).permutation(total)
