"""Continuous batching of chains: every chain advances as soon as its own response is finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cory_env.episode import ChainEpisode
from policies.generation.generator import Request, Response
from policies.rollout.prompt_sampling import PromptRef


class ChainState(NamedTuple):
    """A chain in progress."""

    prompt_ref: PromptRef
    episode: ChainEpisode
    responses: list[Response]
    """The responses generated so far, by position."""


class ChainScheduler:
    """Advances many chains at once. A chain requests its next response as soon as the previous one is finished.

    Some chains need rewards or feedback first: if `observed` is `best`, or if prompts show feedback or the chain stops
    by it. Such a chain waits until no other chain can advance, so that one call covers all waiting chains, in the order
    of their queries. So the batches do not depend on timing.

    Drafts of one stage, which do not see each other, are requested at once.
    """

    def __init__(
        self,
        new_chains: Sequence[tuple[PromptRef, ChainEpisode]],
        make_request: Callable[[int, ChainState, int], Request],
        compute_awaited: Callable[[Sequence[ChainEpisode]], None],
    ) -> None:
        """Initializes the chains, without requesting anything yet.

        Args:
            new_chains: the prompt references, with their episodes before the first response.
            make_request: builds the request for a response from the request's key, the chain's state, and the position,
                whose prompt is the one of the chain's current turn.
            compute_awaited: computes the rewards and the feedback that waiting episodes need, and stores them there.
        """
        self.tokens = 0
        """Response tokens so far."""
        self._make_request = make_request
        self._compute_awaited = compute_awaited
        self.chains = [ChainState(prompt_ref, episode, []) for prompt_ref, episode in new_chains]
        """All chains, in the order of their queries."""
        self._num_positions = max((len(episode.chain.positions) for _, episode in new_chains), default=1)
        self._requested: dict[int, int] = {}
        """By chain, the number of responses requested so far."""
        self._out_of_turn: dict[tuple[int, int], Response] = {}
        """By chain and position, the responses of drafts that finished before an earlier draft."""
        self._num_pending = 0
        self._waiting: list[int] = []

    def start(self) -> list[Request]:
        """Returns the requests for the first responses."""
        return self._next_requests(range(len(self.chains)))

    def on_finished(self, finished: Sequence[tuple[int, Response]]) -> list[Request]:
        """Adds finished responses to their chains.

        Args:
            finished: keys of requests, and their responses.

        Returns:
            The next requests.
        """
        ready: list[int] = []
        for key, response in finished:
            index, position = divmod(key, self._num_positions)
            _, episode, responses = self.chains[index]
            self._out_of_turn[index, position] = response
            while (next_response := self._out_of_turn.pop((index, len(responses)), None)) is not None:
                episode.respond({"tokens": next_response.tokens, "length": len(next_response.tokens)})
                responses.append(next_response)
                self.tokens += len(next_response.tokens)
            if episode.role is not None and len(responses) == self._requested[index]:
                must_wait = episode.awaits_rewards or episode.awaits_feedback
                (self._waiting if must_wait else ready).append(index)
        self._num_pending -= len(finished)
        if self._waiting and not ready and not self._num_pending:
            waiting, self._waiting = sorted(self._waiting), []
            self._compute_awaited([self.chains[index].episode for index in waiting])
            ready = [index for index in waiting if self.chains[index].episode.role is not None]
        return self._next_requests(ready)

    def _next_requests(self, indices: Sequence[int]) -> list[Request]:
        """Returns the requests for the next response of each chain, and of the drafts beside it.

        Agents of the same stage do not see each other, so all of them are asked at once, unless the chain may stop
        between them.
        """
        requests = []
        for index in indices:
            state = self.chains[index]
            chain, first = state.episode.chain, len(state.responses)
            end = first + 1
            while (
                not chain.stops_when_solved
                and end < len(chain.positions)
                and chain.positions[end].stage == chain.positions[first].stage
            ):
                end += 1
            self._requested[index] = end
            requests += [
                self._make_request(index * self._num_positions + position, state, position)
                for position in range(first, end)
            ]
        self._num_pending += len(requests)
        return requests
