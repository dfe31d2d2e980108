"""When the queries of an update are played: as it needs them, or ahead, while the learners learn the one before."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from cory_env.rewarding.worker import RewardError
from policies.generation.generator import GenerationError
from policies.rollout.dealing import Deal, deal
from policies.rollout.episodes import Rollout, join
from policies.rollout.role_mapping import RoleMapping
from policies.rollout.runners import Begun, Runners
from policies.settings.settings import Settings

logger = logging.getLogger(__name__)

MAX_SKIPPED_BATCHES = 5
"""Batches in a row whose rewards may all fail (`on_reward_error=skip`)."""
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
        self.skipped_batches = 0
        """So far. Query order and sampling seeds follow from their number and the update's."""
        self._begun: dict[Of, list[Begun]] = {}
        self._ahead: dict[Of, list[Rollout] | Exception] = {}

    def play(self, update: int, mapping: RoleMapping) -> Rollout:
        """The chains of an update, of all teams, each of which has queries of its own.

        A batch of which all rewards of a team failed is skipped (`on_reward_error=skip`), and the next one played.

        Returns:
            What was played; its counters also cover the batches that were skipped, and `skipped_batches` is their
            number.

        Raises:
            RewardError: more than `MAX_SKIPPED_BATCHES` batches in a row would be skipped.
            RewardError, QueryTooLong, GenerationError, …: as of `Runners.play`, also where they were played ahead.
        """
        skipped: list[Rollout] = []
        for count in range(MAX_SKIPPED_BATCHES + 1):
            batch = self._play(update, mapping)
            failed = [team for team, rollout in zip(mapping.teams(), batch, strict=True) if not rollout.episodes]
            if not failed:
                played = join([*skipped, *batch])
                return Rollout(played.episodes, {**played.counters, "skipped_batches": count})
            skipped += [rollout.without_chains() for rollout in batch]
            self.skipped_batches += 1
            llms = ", ".join(llm for team in failed for llm in team.as_dict().values())
            answered = f" that {llms} answered" if len(failed) < len(batch) else ""
            logger.warning("Update %d: the reward failed on every query%s. The batch is skipped.", update + 1, answered)
        raise RewardError(
            f"The reward failed on every query{answered} of {MAX_SKIPPED_BATCHES + 1} batches in a row, for update "
            f"{update + 1}, so there is nothing to learn from. Correct the reward, or what it depends on."
        )

    def _play(self, update: int, mapping: RoleMapping) -> list[Rollout]:
        """A batch by team: as it was played ahead, if it was."""
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
                self._ahead[of] = [self.runners.finish(begun, ahead=True) for begun in teams]
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
        s, teams, batch = self.settings, mapping.teams(), update + self.skipped_batches
        deals = deal(s.seed, batch, s.queries, self.queries, s.num_generations)
        size = len(deals) // len(teams)
        for k, team in enumerate(teams):
            arguments = {"stream": batch, "mapping": team, "split": "train", "siblings": s.num_siblings}
            yield deals[k * size : (k + 1) * size], arguments
