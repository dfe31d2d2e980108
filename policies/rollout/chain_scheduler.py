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

    Some chains need rewards or feedback first: if several siblings fork from a response, which is rewarded once, if
    `observed` is `best`, or if prompts show feedback or the chain stops by it. Such a chain waits until no other chain
    can advance, so that one call covers all waiting chains, in the order of their queries. So the batches do not depend
    on timing.
    """

    def __init__(
        self,
        new_chains: Sequence[tuple[PromptRef, ChainEpisode]],
        num_siblings: int,
        make_request: Callable[[int, ChainState], Request],
        compute_awaited: Callable[[Sequence[ChainEpisode]], None],
    ) -> None:
        """Initializes the chains, without requesting anything yet.

        Args:
            new_chains: the prompt references, with their episodes before the first response.
            num_siblings: number of chains that fork from each response of the pioneer.
            make_request: builds the request for a chain's next response from the chain's index, which becomes the
                request's key, and its state.
            compute_awaited: computes the rewards and the feedback that waiting episodes need, and stores them there.
        """
        self.tokens = 0
        """Response tokens so far. Tokens that siblings share count once."""
        self._num_siblings = num_siblings
        self._make_request = make_request
        self._compute_awaited = compute_awaited
        self._chains = {
            index * num_siblings: ChainState(prompt_ref, episode, [])
            for index, (prompt_ref, episode) in enumerate(new_chains)
        }
        """By index. The siblings that will fork from a chain take the indices after it."""
        self._num_pending = 0
        self._waiting: list[int] = []

    @property
    def chains(self) -> list[ChainState]:
        """All chains in the order of their queries, siblings side by side."""
        return [self._chains[index] for index in sorted(self._chains)]

    def start(self) -> list[Request]:
        """Returns the requests for the first responses."""
        return self._next_requests(list(self._chains))

    def on_finished(self, finished: Sequence[tuple[int, Response]]) -> list[Request]:
        """Adds finished responses to their chains.

        Args:
            finished: keys of requests, and their responses.

        Returns:
            The next requests.
        """
        ready: list[int] = []
        for index, response in finished:
            _, episode, responses = self._chains[index]
            episode.respond({"tokens": response.tokens, "length": len(response.tokens)})
            responses.append(response)
            self.tokens += len(response.tokens)
            if episode.role is not None:
                (self._waiting if self._must_wait(episode) else ready).append(index)
        self._num_pending -= len(finished)
        if self._waiting and not ready and not self._num_pending:
            waiting, self._waiting = sorted(self._waiting), []
            self._compute_awaited([self._chains[index].episode for index in waiting])
            unfinished = [index for index in waiting if self._chains[index].episode.role is not None]
            ready = [sibling for index in unfinished for sibling in self._fork(index)]
        return self._next_requests(ready)

    def _must_wait(self, episode: ChainEpisode) -> bool:
        forks = self._num_siblings > 1 and len(episode.responses) == 1
        return forks or episode.awaits_rewards or episode.awaits_feedback

    def _fork(self, index: int) -> list[int]:
        """Forks siblings from a chain after the pioneer's response.

        Returns:
            The indices of the siblings, starting with the chain itself.
        """
        prompt_ref, episode, responses = self._chains[index]
        if len(responses) > 1:
            return [index]
        for sibling in range(self._num_siblings):
            fork = ChainState(PromptRef(prompt_ref.query, prompt_ref.sample, sibling), episode.fork(), list(responses))
            self._chains[index + sibling] = fork
        return list(range(index, index + self._num_siblings))

    def _next_requests(self, indices: Sequence[int]) -> list[Request]:
        self._num_pending += len(indices)
        return [self._make_request(index, self._chains[index]) for index in indices]
