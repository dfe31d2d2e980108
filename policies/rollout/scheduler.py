"""`RolloutScheduler`: generates each update's rollout on demand, or prefetches it while the learners train."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from cory_env.rewarding.worker import RewardError
from policies.generation.generator import GenerationError
from policies.learning.estimation import AdvantageEstimator
from policies.rollout.dynamic_sampling import count_tokens, group_by_query, replace_queries, zero_std_queries
from policies.rollout.episodes import Rollout, concat_rollouts
from policies.rollout.prompt_sampling import PromptRef, sample_prompts, sample_replacements
from policies.rollout.role_mapping import RoleMapping
from policies.rollout.runners import PendingRollout, Runners
from policies.settings.settings import Settings

logger = logging.getLogger(__name__)

MAX_SKIPPED_BATCHES = 5
"""Number of batches in a row that may be skipped because all their rewards failed (`on_reward_error=skip`)."""
UpdateKey = tuple[int, RoleMapping]
"""Number of an update, from 0, and its role mapping."""


class RolloutScheduler:
    """Generates the rollouts of updates, and prefetches the next one.

    Prefetching needs no thread: it starts remote calls, and `wait` fetches their results. A prefetched rollout is used
    only for the update and role mapping that it was generated for.

    Attributes:
        skipped_batches: Number of batches skipped so far. Query order and sampling seeds depend on it and the update.
        used_queries: Number of queries that dynamic sampling used so far. Query order depends on it.
    """

    def __init__(self, settings: Settings, runners: Runners, num_queries: int) -> None:
        """Initializes the scheduler."""
        self.settings = settings
        self.runners = runners
        self.num_queries = num_queries
        self.skipped_batches = 0
        self.used_queries = 0
        self._pending: dict[UpdateKey, list[PendingRollout]] = {}
        self._prefetched: dict[UpdateKey, list[Rollout] | Exception] = {}

    def generate(self, update: int, mapping: RoleMapping) -> Rollout:
        """Returns the rollout of an update: the chains of all teams. Each team has its own queries.

        If all rewards of a team fail (`on_reward_error=skip`), the batch is skipped and the next one is generated. With
        `dynamic_sampling`, queries with zero reward variance are replaced.

        Returns:
            The rollout. Its counters also cover skipped batches, whose number is `skipped_batches`, and replaced
            queries, whose number is `replaced_queries`, with `discarded_tokens`.
        """
        skipped: list[Rollout] = []
        for count in range(MAX_SKIPPED_BATCHES + 1):
            batch = self._batch(update, mapping)
            if all(rollout.episodes for rollout in batch):
                batch, replacement_counters = self._replace_zero_std(update, mapping, batch)
                combined = concat_rollouts([*skipped, *batch])
                counters = {**combined.counters, "skipped_batches": count, **replacement_counters}
                return Rollout(combined.episodes, counters)
            skipped += [rollout.without_chains() for rollout in batch]
            self.skipped_batches += 1
            logger.warning("Update %d: the reward failed on every query. Skipping the batch.", update + 1)
        raise RewardError(
            f"The reward failed on every query of {MAX_SKIPPED_BATCHES + 1} batches in a row, for update {update + 1}. "
            "Fix the reward or the services it depends on."
        )

    def _replace_zero_std(
        self, update: int, mapping: RoleMapping, batch: list[Rollout]
    ) -> tuple[list[Rollout], dict[str, int]]:
        """Replaces queries with zero reward variance in up to `dynamic_sampling` rounds; those left after them stay.

        Everything is decided here, by queries in their order, so the number of runners changes nothing.

        Returns:
            The rollout by team, and the counters of replacements.
        """
        s, counters = self.settings, {"replaced_queries": 0, "discarded_tokens": 0}
        if s.dynamic_sampling is None:
            return batch, counters
        teams = list(self._team_batches(update, mapping))
        samples, credit = s.num_generations, s.credit_assignment
        excluded = {prompt_ref.query for prompt_refs, _ in teams for prompt_ref in prompt_refs}
        estimators = {policy_id: AdvantageEstimator(s.hyperparameters) for policy_id in s.policy_ids}
        next_index = (update + self.skipped_batches + 1) * s.queries_per_update + self.used_queries
        for _ in range(s.dynamic_sampling):
            num_replaced = counters["replaced_queries"]
            for k, (_, arguments) in enumerate(teams):
                replaced = zero_std_queries(batch[k], credit, estimators)
                count = sum(query in replaced for query, _ in group_by_query(batch[k], samples))
                new_queries, used = sample_replacements(s.seed, next_index, count, self.num_queries, excluded)
                if not new_queries:
                    continue
                next_index, self.used_queries = next_index + used, self.used_queries + used
                excluded |= set(new_queries)
                new_refs = [PromptRef(query, sample) for query in new_queries for sample in range(samples)]
                new = self.runners.generate(new_refs, **arguments)
                batch[k], discarded = replace_queries(batch[k], replaced, new, samples)
                counters["replaced_queries"] += len({ref.query for ref in new.prompt_refs})
                counters["discarded_tokens"] += count_tokens(discarded)
            if counters["replaced_queries"] == num_replaced:
                break
        return batch, counters

    def _batch(self, update: int, mapping: RoleMapping) -> list[Rollout]:
        """Returns an update's rollout by team, prefetched or generated now."""
        prefetched = self._prefetched.get((update, mapping))
        self.discard_prefetched()
        if isinstance(prefetched, Exception):
            raise prefetched
        if prefetched is not None:
            return prefetched
        return [
            self.runners.generate(prompt_refs, **arguments)
            for prompt_refs, arguments in self._team_batches(update, mapping)
        ]

    def prefetch(self, update: int, mapping: RoleMapping) -> None:
        """Starts an update's rollout with the runners' current weights, without waiting for it."""
        self._pending = {
            (update, mapping): [
                self.runners.start(prompt_refs, **arguments)
                for prompt_refs, arguments in self._team_batches(update, mapping)
            ]
        }

    def wait(self) -> None:
        """Waits for the prefetched rollout, so that the runners can get new weights. `generate` raises its errors."""
        for key, pending_rollouts in self._pending.items():
            try:
                self._prefetched[key] = [self.runners.wait(pending, prefetched=True) for pending in pending_rollouts]
            except GenerationError as error:
                logger.warning("%s Generating the rollout again.", error)
            except Exception as error:
                self._prefetched[key] = error
        self._pending = {}

    def discard_prefetched(self) -> None:
        """Discards prefetched rollouts."""
        self._prefetched, self._pending = {}, {}

    def _team_batches(self, update: int, mapping: RoleMapping) -> Iterator[tuple[Sequence[PromptRef], dict[str, Any]]]:
        """Yields each team's queries, and the other arguments of `ChainRunner.sample`."""
        s, teams, batch = self.settings, mapping.teams(), update + self.skipped_batches
        prompt_refs = sample_prompts(
            s.seed, batch, s.queries_per_update, self.num_queries, s.num_generations, self.used_queries
        )
        size = len(prompt_refs) // len(teams)
        for k, team in enumerate(teams):
            arguments = {"update": batch, "mapping": team, "split": "train"}
            yield prompt_refs[k * size : (k + 1) * size], arguments
