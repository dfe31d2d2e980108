"""Which queries an update samples; all of it follows from (seed, update), so a restored run samples the same ones."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np


class PromptRef(NamedTuple):
    """A query to play: its index in the split, and which sample of it this is (a query may be dealt twice)."""

    query: int
    sample: int = 0
    sibling: int = 0
    """Which of the chains that go on from the same response of the pioneer."""


def sample_prompts(seed: int, update: int, size: int, total: int, samples: int = 1) -> list[PromptRef]:
    """The queries of one update: the next ones of an endless row of seeded permutations of all of them.

    Args:
        seed: of the run.
        update: counted from 0.
        size: queries per update.
        total: training queries that there are.
        samples: times that each query is played.
    """
    prompt_refs: list[PromptRef] = []
    dealt: dict[int, int] = {}
    for place in range(update * size, (update + 1) * size):
        epoch, offset = divmod(place, total)
        query = int(query_order(seed, epoch, total)[offset])
        first = dealt.get(query, 0)
        dealt[query] = first + samples
        prompt_refs += [PromptRef(query, sample) for sample in range(first, first + samples)]
    return prompt_refs


@lru_cache(maxsize=2)
def query_order(seed: int, epoch: int, total: int) -> np.ndarray:
    """The order of the training queries in one pass over them: a permutation drawn from (seed, epoch)."""
    return np.random.default_rng([seed, epoch]).permutation(total)
