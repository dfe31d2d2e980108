"""The interface of generation backends: sample responses with log-probabilities, and load new weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from policies.models.weights import Weights

EVALUATION_UPDATE = 2**32 - 1
"""The `update` of evaluations, so that every evaluation samples with the same seeds."""


class Response(NamedTuple):
    """One sampled response.

    Attributes:
        tokens: 1 to `max_tokens` token ids. The last one is a stop token unless the response was cut at `max_tokens`.
        logprobs: Log-probability of each token at the sampling temperature, in nats.
    """

    tokens: list[int]
    logprobs: list[float]


class Sampling(NamedTuple):
    """Sampling parameters. There is no top-k, top-p or penalty, because the learner could not score such samples.

    Attributes:
        temperature: 0 is greedy decoding.
        seeds: One per prompt, so that a response does not depend on the rest of its batch.
        stop_token_ids: Any of them ends a response.
    """

    temperature: float
    max_tokens: int
    seeds: Sequence[int]
    stop_token_ids: Sequence[int]


class Request(NamedTuple):
    """A request for one response.

    Attributes:
        key: The caller's id of the request.
        prompt: 1 to `max_prompt_tokens` token ids.
        sampling: With one seed.
    """

    key: int
    policy_id: str
    prompt: Sequence[int]
    sampling: Sampling


OnFinished = Callable[[Sequence[tuple[int, Response]]], Sequence[Request]]
"""Callback: keys and responses of finished requests → the next requests."""


IsReady = Callable[[], bool]


class LoadedWeights(NamedTuple):
    """The weights that a backend holds after `load`.

    Attributes:
        checksum: `checksum` of the weights as the engine read them.
        stale: Names, in the engine, of weights that were not updated.
    """

    version: int
    checksum: int
    stale: tuple[str, ...] = ()


class GenerationError(RuntimeError):
    """The generation engine died, hung or holds wrong weights."""


class Generator(Protocol):
    """A generation backend, with one set of weights per policy.

    Attributes:
        in_batches: Whether requests form batches that finish together, so that it pays to wait until all are there.
    """

    in_batches: bool

    def generate(self, prompts: Sequence[Sequence[int]], policy_id: str, sampling: Sampling) -> list[Response]:
        """Samples one response per prompt with the weights of `policy_id`.

        Raises:
            GenerationError: the engine died or did not respond in time.
        """
        ...

    def run_requests(
        self, requests: Sequence[Request], on_finished: OnFinished, is_ready: IsReady = lambda: False
    ) -> None:
        """Samples responses to requests, and to the requests that follow from them, until none is left.

        Args:
            on_finished: called with finished responses, each of them once; returns the next requests. Its exceptions
                end the run.
            is_ready: tells whether a call of `on_finished` without finished requests would return more of them.

        Raises:
            GenerationError: an engine died or did not respond in time.
        """
        ...

    def load(self, policy_id: str, weights: Weights, version: int) -> LoadedWeights:
        """Replaces a policy's weights, and drops all caches computed with the old ones.

        Args:
            weights: fp32 arrays by Hugging Face name.

        Raises:
            GenerationError: the engine failed to load them.
        """
        ...

    def close(self) -> None:
        """Stops the engines and frees their memory."""
        ...


def sampling_seed(seed: int, update: int, query: int, position: int, sample: int = 0) -> int:
    """Returns the 63-bit seed of one response. It does not depend on runners or batches.

    Args:
        seed: of the run.
        update: number of the update, from 0, or `EVALUATION_UPDATE`.
        query: index of the query in its split.
        position: of the agent in the chain.
        sample: which response to this query at this position.
    """
    words = np.random.SeedSequence([seed, update, query, position, sample]).generate_state(2, np.uint64)
    return int(words[0]) >> 1
