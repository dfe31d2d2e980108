"""When the queries of an update are played: as it needs them, or ahead, while the learners learn the one before."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from policies.generation.generator import GenerationError
from policies.rollout.chain_runner import Rollout
from policies.rollout.dealing import Deal, deal
from policies.rollout.role_mapping import RoleMapping
from policies.rollout.runners import Begun, Runners
from policies.settings.settings import Settings

logger = logging.getLogger(__name__)

Of = tuple[int, RoleMapping]
"""What is played: an update's number, from 0, and who plays which role."""


class Playing:
    """Plays the queries of updates.

    Playing ahead needs no thread: runners are asked, and later their answers are fetched. What was played ahead counts
    only for the update and the roles that it was played for.
    """

    def __init__(self, settings: Settings, runners: Runners, queries: int) -> None:
        """Takes who plays.

        Args:
            settings: say what an update plays.
            runners: who play it.
            queries: training queries that there are.
        """
        self.settings = settings
        self.runners = runners
        self.queries = queries
        self._begun: dict[Of, list[Begun]] = {}
        self._ahead: dict[Of, list[list[Rollout]] | Exception] = {}

    def play(self, update: int, mapping: RoleMapping) -> list[list[Rollout]]:
        """The rollouts of an update, by team, each of which has queries of its own.

        Raises:
            RewardError, QueryTooLong, GenerationError, …: as of `Runners.play`, also where they were played ahead.
        """
        ahead = self._ahead.get((update, mapping))
        self.forget()
        if isinstance(ahead, Exception):
            raise ahead
        if ahead is not None:
            return ahead
        return [self.runners.play(deals, **arguments) for deals, arguments in self._work(update, mapping)]

    def begin(self, update: int, mapping: RoleMapping) -> None:
        """Lets the runners play ahead, with the weights that they have."""
        work = self._work(update, mapping)
        self._begun = {(update, mapping): [self.runners.begin(deals, **arguments) for deals, arguments in work]}

    def finish(self) -> None:
        """Waits for what was begun, so that runners can get new weights. What fails is raised by `play`."""
        for of, teams in self._begun.items():
            try:
                self._ahead[of] = [self.runners.finish(begun, self.runners.left) for begun in teams]
            except GenerationError as error:
                logger.warning("%s The queries are played again.", error)
            except Exception as error:
                self._ahead[of] = error
        self._begun = {}

    def forget(self) -> None:
        """Forgets what was played ahead."""
        self._ahead, self._begun = {}, {}

    def _work(self, update: int, mapping: RoleMapping) -> Iterator[tuple[Sequence[Deal], dict[str, Any]]]:
        """Yields each team's queries, and the other arguments of `ChainRunner.sample`."""
        s, teams = self.settings, mapping.teams()
        deals = deal(s.seed, update, s.queries, self.queries, s.num_generations)
        size = len(deals) // len(teams)
        for k, team in enumerate(teams):
            arguments = {"stream": update, "mapping": team, "split": "train", "siblings": s.num_siblings}
            yield deals[k * size : (k + 1) * size], arguments
