"""What every generation backend does: sample responses with log-probabilities, and take new weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from policies.models.weights import Weights

EVALUATION_STREAM = 2**32 - 1
"""Sampling stream of what is no training update: the same seeds at every evaluation."""


class Response(NamedTuple):
    """One sampled response."""

    tokens: list[int]
    """1 to `max_tokens` token ids; the last one is a stop token unless the length was cut."""
    logprobs: list[float]
    """Log-probability of each token at the sampling temperature, in nats."""


class Sampling(NamedTuple):
    """How to sample: by temperature alone; the learner could not score what top-k, top-p or penalties sample."""

    temperature: float
    max_tokens: int
    seeds: Sequence[int]
    """One per prompt, so that a response does not depend on what else is in its batch."""
    stop_token_ids: Sequence[int]
    """Each ends a response."""


class Request(NamedTuple):
    """A response that is asked for."""

    key: int
    """By which whoever asks knows it."""
    policy_id: str
    """Which LLM is asked."""
    prompt: Sequence[int]
    """Token ids, 1 to `max_prompt_tokens`."""
    sampling: Sampling
    """With one seed."""


OnFinished = Callable[[Sequence[tuple[int, Response]]], Sequence[Request]]
"""Responses that have ended, with their keys → what is asked for next."""


class LoadedWeights(NamedTuple):
    """What a backend holds after `load`."""

    version: int
    checksum: int
    """`checksum` of the weights as the engine read them."""
    stale: tuple[str, ...] = ()
    """The engine's names of those of its weights that were not among them, so are the old ones."""


class GenerationError(RuntimeError):
    """The generation engine died, hung or holds wrong weights; the message says which and what was tried."""


class Generator(Protocol):
    """A generation backend: one set of weights per LLM, all behind `load`."""

    def generate(self, prompts: Sequence[Sequence[int]], policy_id: str, sampling: Sampling) -> list[Response]:
        """Samples one response per prompt with the weights of `policy_id`.

        Args:
            prompts: token ids, 1 to `max_prompt_tokens` each.
            policy_id: which LLM.
            sampling: temperature, length, one seed per prompt, what ends a response.

        Raises:
            GenerationError: the engine died or did not answer in time.
        """
        ...

    def run_requests(self, requests: Sequence[Request], follow: OnFinished) -> None:
        """Samples responses, and those that are asked for as they end, until nothing more is.

        Args:
            requests: what is asked for first.
            follow: called whenever responses have ended, each once. What it raises ends the conversation.

        Raises:
            GenerationError: an engine died or did not answer in time.
        """
        ...

    def load(self, policy_id: str, weights: Weights, version: int) -> LoadedWeights:
        """Replaces the weights of `policy_id`, drops every cache that came from the old ones, and reads back what it
        holds.

        Raises:
            GenerationError: the engine could not take them.
        """
        ...

    def close(self) -> None:
        """Frees the engines and their memory."""
        ...


def sampling_seed(seed: int, update: int, query: int, position: int, sample: int = 0) -> int:
    """The seed of one response, from what it answers: independent of runners and batches; a 63-bit integer."""
    words = np.random.SeedSequence([seed, update, query, position, sample]).generate_state(2, np.uint64)
    return int(words[0]) >> 1
