"""When the queries of an update are played: as it needs them, or before, while the learners learn the one before."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from cory_env.rewarding.worker import RewardError
from policies.generation.generator import GenerationError
from policies.rollout.episodes import Rollout, join
from policies.rollout.prompt_sampling import PromptRef, sample_prompts
from policies.rollout.role_mapping import RoleMapping
from policies.rollout.runners import PendingRollout, Runners
from policies.settings.settings import Settings

logger = logging.getLogger(__name__)

MAX_SKIPPED_BATCHES = 5
"""Batches in a row whose rewards may all fail (`on_reward_error=skip`)."""
Of = tuple[int, RoleMapping]
"""What is played: an update's number, from 0, and who plays which role."""


class RolloutScheduler:
    """Plays the queries of updates, and prefetches those of the next.

    Prefetching needs no thread: runners are asked, and later their answers are fetched. What was prefetched counts only
    for the update and the roles that it was played for.
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
        self._pending: dict[Of, list[PendingRollout]] = {}
        self._prefetched: dict[Of, list[Rollout] | Exception] = {}

    def generate(self, update: int, mapping: RoleMapping) -> Rollout:
        """The chains of an update, of all teams, each of which has queries of its own.

        A batch of which all rewards of a team failed is skipped (`on_reward_error=skip`), and the next one played.

        Returns:
            What was played; its counters also cover the batches that were skipped, and `skipped_batches` is their
            number.

        Raises:
            RewardError: more than `MAX_SKIPPED_BATCHES` batches in a row would be skipped.
            RewardError, QueryTooLong, GenerationError, …: as of `Runners.play`, also where they were prefetched.
        """
        skipped: list[Rollout] = []
        for count in range(MAX_SKIPPED_BATCHES + 1):
            batch = self._batch(update, mapping)
            if all(rollout.episodes for rollout in batch):
                played = join([*skipped, *batch])
                return Rollout(played.episodes, {**played.counters, "skipped_batches": count})
            skipped += [rollout.without_chains() for rollout in batch]
            self.skipped_batches += 1
            logger.warning("Update %d: the reward failed on every query. The batch is skipped.", update + 1)
        raise RewardError(
            f"The reward failed on every query of {MAX_SKIPPED_BATCHES + 1} batches in a row, for update {update + 1}, "
            "so there is nothing to learn from. Correct the reward, or what it depends on."
        )

    def _batch(self, update: int, mapping: RoleMapping) -> list[Rollout]:
        """A batch by team: as it was prefetched, if it was."""
        prefetched = self._prefetched.get((update, mapping))
        self.discard_prefetched()
        if isinstance(prefetched, Exception):
            raise prefetched
        if prefetched is not None:
            return prefetched
        return [self.runners.play(prompt_refs, **arguments) for prompt_refs, arguments in self._work(update, mapping)]

    def prefetch(self, update: int, mapping: RoleMapping) -> None:
        """Lets the runners begin with an update, with the weights that they have."""
        work = self._work(update, mapping)
        self._pending = {
            (update, mapping): [self.runners.begin(prompt_refs, **arguments) for prompt_refs, arguments in work]
        }

    def wait(self) -> None:
        """Waits for what is prefetched, so that runners can get new weights. What fails is raised by `generate`."""
        for of, teams in self._pending.items():
            try:
                self._prefetched[of] = [self.runners.wait(pending, prefetched=True) for pending in teams]
            except GenerationError as error:
                logger.warning("%s The queries are played again.", error)
            except Exception as error:
                self._prefetched[of] = error
        self._pending = {}

    def discard_prefetched(self) -> None:
        """Forgets what was prefetched."""
        self._prefetched, self._pending = {}, {}

    def _work(self, update: int, mapping: RoleMapping) -> Iterator[tuple[Sequence[PromptRef], dict[str, Any]]]:
        """Yields each team's queries, and the other arguments of `ChainRunner.sample`."""
        s, teams, batch = self.settings, mapping.teams(), update + self.skipped_batches
        prompt_refs = sample_prompts(s.seed, batch, s.queries_per_update, self.queries, s.num_generations)
        size = len(prompt_refs) // len(teams)
        for k, team in enumerate(teams):
            arguments = {"stream": batch, "mapping": team, "split": "train", "siblings": s.num_siblings}
            yield prompt_refs[k * size : (k + 1) * size], arguments
