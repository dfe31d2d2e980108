"""`Responder`: generates the responses of a probe's episodes, by policies in this process or by an API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from cory_env.chain import Chain
from cory_env.episode import ChainEpisode
from cory_env.tasks import Query

Continue = Callable[[Sequence[ChainEpisode]], None]
"""Computes the feedback that episodes wait for."""


class Responder(Protocol):
    """Generates the responses of episodes."""

    def make_episode(self, chain: Chain, query: Query) -> ChainEpisode:
        """Returns a new episode."""

    def replay_first(self, chain: Chain, episode: ChainEpisode) -> ChainEpisode:
        """Returns an episode of another chain with the same query and the same first response."""

    def respond(
        self,
        episodes: Sequence[ChainEpisode],
        samples: Sequence[int],
        policy_ids: Sequence[str],
        temperature: float,
        continue_episodes: Continue | None = None,
    ) -> None:
        """Generates the responses of episodes to their ends, and stores them there.

        Args:
            samples: By episode, the index of the sample; part of the sampling seeds.
            policy_ids: By position.
            continue_episodes: Computes feedback; None if no turn depends on any.
        """

    def close(self) -> None:
        """Frees engines and connections."""
