"""`generate_chains`, the one driver of chains: under rollouts, evaluation, `generate`, `probe` and `serve`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Self

from cory_env.episode import ChainEpisode
from policies.generation.generator import EVALUATION_UPDATE, Generator, Request, Response, Sampling, sampling_seed


class ChainRequest(NamedTuple):
    """A request for the responses of a chain, from the current position of its episode on.

    Attributes:
        episode: The id of its query is part of the sampling seeds, as are `seed`, `update` and `sample`.
        policy_ids: By position.
        limits: By position, the maximum number of tokens of a response.
    """

    episode: ChainEpisode
    policy_ids: Sequence[str]
    limits: Sequence[int]
    temperature: float
    seed: int
    sample: int = 0
    update: int = EVALUATION_UPDATE

    def restarted(self) -> Self:
        """Returns the request with a new episode of the same query."""
        return self._replace(episode=type(self.episode)(self.episode.chain, self.episode.query))


def generate_chains(
    generator: Generator,
    chains: Sequence[ChainRequest],
    compute_awaited: Callable[[Sequence[ChainEpisode]], None] | None = None,
) -> list[list[Response]]:
    """Generates the responses of chains with continuous batching, and stores them in their episodes.

    A chain requests its next response as soon as the previous one is finished. Drafts of one stage, which do not see
    each other, are requested at once.

    Some chains need feedback first, because a prompt shows it or it may stop the chain. Such a chain waits until no
    other chain can advance, so that one call covers all waiting chains, in the order of `chains`. So the batches do not
    depend on timing.

    Args:
        compute_awaited: computes the feedback that waiting episodes need, and stores it there. None if no chain needs
            any.

    Returns:
        By chain, the generated responses in the order of the positions. The episode's own may be shorter, if a stop
        string ended them.
    """
    scheduler = _Scheduler(chains, compute_awaited)
    generator.run_requests(scheduler.advance(range(len(chains))), scheduler.on_finished)
    return scheduler.responses


class _Scheduler:
    """Decides which requests follow from finished ones."""

    def __init__(
        self,
        chains: Sequence[ChainRequest],
        compute_awaited: Callable[[Sequence[ChainEpisode]], None] | None,
    ) -> None:
        self.responses: list[list[Response]] = [[] for _ in chains]
        self._chains = chains
        self._compute_awaited = compute_awaited
        self._num_positions = max((len(chain.episode.chain.positions) for chain in chains), default=1)
        self._requested = [0] * len(chains)  # by chain, the number of responses requested so far
        # By chain and position, the responses of drafts that finished before an earlier draft.
        self._out_of_turn: dict[tuple[int, int], Response] = {}
        self._num_pending = 0
        self._waiting: list[int] = []

    def on_finished(self, finished: Sequence[tuple[int, Response]]) -> list[Request]:
        """Adds finished responses to their chains, and returns the next requests."""
        advanced: list[int] = []
        for key, response in finished:
            index, position = divmod(key, self._num_positions)
            episode = self._chains[index].episode
            self._out_of_turn[index, position] = response
            while (response_in_turn := self._out_of_turn.pop((index, len(episode.responses)), None)) is not None:
                episode.respond({"tokens": response_in_turn.tokens, "length": len(response_in_turn.tokens)})
                self.responses[index].append(response_in_turn)
            if len(episode.responses) == self._requested[index]:
                advanced.append(index)
        self._num_pending -= len(finished)
        return self.advance(advanced)

    def advance(self, indices: Iterable[int]) -> list[Request]:
        """Returns the next requests of chains without pending responses; without any, those of waiting chains."""
        ready: list[int] = []
        for index in indices:
            episode = self._chains[index].episode
            if episode.agent is not None:
                (self._waiting if episode.awaits_feedback else ready).append(index)
        if self._waiting and not ready and not self._num_pending:
            assert self._compute_awaited is not None
            waiting, self._waiting = sorted(self._waiting), []
            self._compute_awaited([self._chains[index].episode for index in waiting])
            ready = [index for index in waiting if self._chains[index].episode.agent is not None]
        requests = [request for index in ready for request in self._stage_requests(index)]
        self._num_pending += len(requests)
        return requests

    def _stage_requests(self, index: int) -> list[Request]:
        """Returns the requests for a chain's next response, and for the drafts beside it.

        Agents of the same stage do not see each other, so all of them are asked at once, unless the chain may stop
        between them. They have the same prompt.
        """
        episode, policy_ids, limits, temperature, seed, sample, update = self._chains[index]
        chain, first = episode.chain, len(episode.responses)
        end = first + 1
        while (
            not chain.stops_when_solved
            and end < len(chain.positions)
            and chain.positions[end].stage == chain.positions[first].stage
        ):
            end += 1
        self._requested[index] = end
        return [
            Request(
                index * self._num_positions + position,
                policy_ids[position],
                episode.prompt_ids(),
                Sampling(
                    temperature,
                    limits[position],
                    [sampling_seed(seed, update, episode.query.id, position, sample)],
                    chain.encoders[position].stop_token_ids,
                ),
            )
            for position in range(first, end)
        ]
