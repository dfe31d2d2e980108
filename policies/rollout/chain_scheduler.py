"""Chains that are played at once, each at its own pace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cory_env.episode import ChainEpisode
from policies.generation.generator import Request, Response
from policies.rollout.prompt_sampling import PromptRef


class ChainState(NamedTuple):
    """A chain on its way."""

    prompt_ref: PromptRef
    episode: ChainEpisode
    responses: list[Response]
    """What was generated for it so far."""


class ChainScheduler:
    """Chains that are played at once: each goes on as soon as its own response is there.

    Where that takes rewards (several chains go on from a response, which is rewarded once, or `observed` is `best`), it
    waits until all the others have come as far, so that one call of the reward has them all, in the order dealt.
    """

    def __init__(
        self,
        prompt_refs: Sequence[tuple[PromptRef, ChainEpisode]],
        siblings: int,
        ask: Callable[[int, ChainState], Request],
        reward: Callable[[Sequence[ChainEpisode]], None],
    ) -> None:
        """Nothing is asked for yet.

        Args:
            prompt_refs: what is played, and the episodes at their start.
            siblings: chains that go on from each response of the pioneer.
            ask: place in the game and chain → what its next agent is asked for, under that place as its key.
            reward: notes rewards in episodes, for the responses that have none.
        """
        self.tokens = 0
        """Response tokens so far; the siblings' common ones count once."""
        self._siblings = siblings
        self._ask = ask
        self._reward = reward
        self._playing = {place * siblings: ChainState(*each, []) for place, each in enumerate(prompt_refs)}
        self._awaited = 0
        self._held: list[int] = []

    @property
    def chains(self) -> list[ChainState]:
        """All chains in the order dealt, siblings side by side."""
        return [self._playing[place] for place in sorted(self._playing)]

    def start(self) -> list[Request]:
        """What is asked for first."""
        return self._go_on(list(self._playing))

    def follow(self, ended: Sequence[tuple[int, Response]]) -> list[Request]:
        """Takes responses, and returns what is asked for next."""
        ready: list[int] = []
        for place, response in ended:
            _, episode, responses = self._playing[place]
            episode.respond({"tokens": response.tokens, "length": len(response.tokens)})
            responses.append(response)
            self.tokens += len(response.tokens)
            if episode.role is not None:
                (self._held if self._needs_reward(episode) else ready).append(place)
        self._awaited -= len(ended)
        if self._held and not ready and not self._awaited:
            held, self._held = sorted(self._held), []
            self._reward([self._playing[place].episode for place in held])
            ready = [sibling for place in held for sibling in self._forked(place)]
        return self._go_on(ready)

    def _needs_reward(self, episode: ChainEpisode) -> bool:
        return episode.awaits_rewards or (self._siblings > 1 and len(episode.responses) == 1)

    def _forked(self, place: int) -> list[int]:
        """The places of the chains that go on from one, which is the first of them."""
        prompt_ref, episode, responses = self._playing[place]
        if len(responses) > 1:
            return [place]
        for sibling in range(self._siblings):
            fork = ChainState(PromptRef(prompt_ref.query, prompt_ref.sample, sibling), episode.fork(), list(responses))
            self._playing[place + sibling] = fork
        return list(range(place, place + self._siblings))

    def _go_on(self, places: Sequence[int]) -> list[Request]:
        self._awaited += len(places)
        return [self._ask(place, self._playing[place]) for place in places]
