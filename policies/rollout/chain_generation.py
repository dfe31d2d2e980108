"""`generate_chains`, the one driver of episodes: under rollouts, evaluation, `generate`, `probe` and `serve`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, Self

from cory_env.episode import ChainEpisode, Episode
from cory_env.text_envs.pool import Patience
from policies.generation.generator import EVALUATION_UPDATE, Generator, Request, Response, Sampling, sampling_seed


class ChainRequest(NamedTuple):
    """A request for the responses of an episode, from its current turn on.

    Attributes:
        episode: The id of its query is part of the sampling seeds, as are `seed`, `update` and `sample`.
        policy_ids: By position.
        limits: By position, the maximum number of tokens of a response.
    """

    episode: Episode
    policy_ids: Sequence[str]
    limits: Sequence[int]
    temperature: float
    seed: int
    sample: int = 0
    update: int = EVALUATION_UPDATE

    def restarted(self) -> Self:
        """Returns the request with a new episode of the same query."""
        return self._replace(episode=type(self.episode)(self.episode.chain, self.episode.query))


class EpisodeContinuation(Protocol):
    """Continues the episodes that wait for something other than a response."""

    def submit(self, index: int, episode: Any) -> None:
        """Takes an episode that waits, and its number."""

    def is_ready(self) -> bool:
        """Returns whether `collect` would return any without waiting."""

    def collect(self, patience: Patience) -> list[int]:
        """Returns the numbers of episodes that need not wait any more, each once.

        Args:
            patience: whether to wait for none, any or all of them; without `none`, nothing else is left to do.
        """


class FeedbackTogether:
    """Computes the feedback that chains wait for when no other chain can advance, in one call for all of them.

    So the batches do not depend on timing.
    """

    def __init__(self, compute_awaited: Callable[[Sequence[ChainEpisode]], None]) -> None:
        """Initializes without chains.

        Args:
            compute_awaited: computes the feedback that waiting chains need, and stores it there.
        """
        self._compute_awaited = compute_awaited
        self._waiting: dict[int, ChainEpisode] = {}

    def submit(self, index: int, episode: ChainEpisode) -> None:
        """See `EpisodeContinuation`."""
        self._waiting[index] = episode

    def is_ready(self) -> bool:
        """See `EpisodeContinuation`."""
        return False

    def collect(self, patience: Patience) -> list[int]:
        """See `EpisodeContinuation`."""
        if patience == "none":
            return []
        waiting, self._waiting = dict(sorted(self._waiting.items())), {}
        self._compute_awaited([*waiting.values()])
        return [*waiting]


def generate_chains(
    generator: Generator, chains: Sequence[ChainRequest], continuation: EpisodeContinuation | None = None
) -> list[list[Response]]:
    """Generates the responses of episodes with continuous batching, and stores them there.

    An episode requests its next response as soon as the previous one is finished. Drafts of one stage, which do not see
    each other, are requested at once.

    Args:
        continuation: continues episodes that wait: for feedback that a prompt shows or that may stop a chain, or for a
            step of an environment. None if none does.

    Returns:
        By episode, the generated responses in the order of the turns. The episode's own may be shorter, if a stop
        string ended them.
    """
    scheduler = _Scheduler(chains, continuation, "all" if generator.in_batches else "any")
    generator.run_requests(scheduler.advance(range(len(chains))), scheduler.on_finished, scheduler.is_ready)
    return scheduler.responses


class _Scheduler:
    """Decides which requests follow from finished ones."""

    def __init__(
        self, chains: Sequence[ChainRequest], continuation: EpisodeContinuation | None, patience: Patience
    ) -> None:
        self.responses: list[list[Response]] = [[] for _ in chains]
        self._chains = chains
        self._continuation = continuation
        self._patience = patience
        self._max_turns = max((request.episode.max_turns for request in chains), default=1)
        self._requested = [0] * len(chains)  # by episode, the number of responses requested so far
        # By episode and turn, the responses of drafts that finished before an earlier draft.
        self._out_of_turn: dict[tuple[int, int], Response] = {}
        self._num_pending = 0
        self._num_waiting = 0

    def is_ready(self) -> bool:
        """Returns whether an episode that waited need not do so any more."""
        return self._num_waiting > 0 and self._continuation is not None and self._continuation.is_ready()

    def on_finished(self, finished: Sequence[tuple[int, Response]]) -> list[Request]:
        """Adds finished responses to their episodes, and returns the next requests."""
        advanced: list[int] = []
        for key, response in finished:
            index, turn = divmod(key, self._max_turns)
            episode = self._chains[index].episode
            self._out_of_turn[index, turn] = response
            while (response_in_turn := self._out_of_turn.pop((index, len(episode.responses)), None)) is not None:
                episode.respond({"tokens": response_in_turn.tokens, "length": len(response_in_turn.tokens)})
                self.responses[index].append(response_in_turn)
            if len(episode.responses) == self._requested[index]:
                advanced.append(index)
        self._num_pending -= len(finished)
        return self.advance(advanced)

    def advance(self, indices: Iterable[int]) -> list[Request]:
        """Returns the next requests of episodes without pending responses, and of those that need not wait any more.

        Waits only if there would be no requests at all.
        """
        requests: list[Request] = []
        while True:
            for index in indices:
                episode = self._chains[index].episode
                if episode.is_waiting:
                    assert self._continuation is not None
                    self._continuation.submit(index, episode)
                    self._num_waiting += 1
                elif episode.agent is not None:
                    requests += self._next_requests(index)
            if not self._num_waiting:
                break
            assert self._continuation is not None
            indices = self._continuation.collect("none" if requests or self._num_pending else self._patience)
            self._num_waiting -= len(indices)
            if not indices:
                break
        self._num_pending += len(requests)
        return requests

    def _next_requests(self, index: int) -> list[Request]:
        episode, policy_ids, limits, temperature, seed, sample, update = self._chains[index]
        turns, prompt = episode.next_turns, episode.prompt_ids()
        self._requested[index] = turns.stop
        requests = []
        for turn in turns:
            position = episode.position(turn)
            sampling = Sampling(
                temperature,
                limits[position],
                [sampling_seed(seed, update, episode.query.id, turn, sample)],
                episode.encoder(turn).stop_token_ids,
            )
            requests.append(Request(index * self._max_turns + turn, policy_ids[position], prompt, sampling))
        return requests
