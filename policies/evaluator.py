"""Measures policies on queries that nothing is learned from."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from cory_env.tasks import Split, Task
from policies.generation.generator import EVALUATION_STREAM
from policies.learning.measures import MEASURED, measure_responses
from policies.learning.rows import at_position
from policies.models.model_names import AVERAGE
from policies.rllib.learners import Learners
from policies.rllib.token_batch import rows_of
from policies.rollout.chain_runner import Rollout
from policies.rollout.dealing import Deal
from policies.rollout.role_mapping import RoleMapping
from policies.rollout.runners import Runners
from policies.settings.settings import Settings

logger = logging.getLogger(__name__)


class Evaluator:
    """Lets the present weights answer; always the same queries with the same seeds.

    Its methods raise RewardError, GenerationError and LearnerError, as an update does.
    """

    def __init__(self, settings: Settings, task: Task, runners: Runners, learners: Learners) -> None:
        """Takes who plays, and who knows how likely a response is."""
        self.settings = settings
        self.task = task
        self.runners = runners
        self.learners = learners

    def evaluate_policies(self) -> dict[str, dict[str, float]]:
        """Evaluation in training: each policy alone on the bare validation queries.

        Returns:
            `{llm: {task_reward, kl, combined_reward, response_length, eos_rate, repetition}}`, with `evaluate_average`
            those of the `AVERAGE` of the LLMs, and the `mean` of the LLMs' figures, which the average has no part in;
            NaN where the reward failed on every query (`on_reward_error: skip`).
        """
        count = min(self.settings.eval_queries, len(self.task.queries("validation")))
        out = {name: self._alone(name, count) for name in self.settings.modules}
        mean = {name: float(np.mean([each[name] for each in out.values()])) for name in MEASURED}
        if self.settings.evaluate_average:
            with self.average():
                out[AVERAGE] = self._alone(AVERAGE, count)
        return {**out, "mean": mean}

    def _alone(self, name: str, count: int) -> dict[str, float]:
        """Means of an LLM's figures on the first validation queries."""
        deals = [Deal(query) for query in range(count)]
        _, figures = self.measure(deals, RoleMapping(("pioneer",), (self.player(name),)), "validation")
        if not figures:
            logger.warning("The reward failed on all %d held-out queries of %s: not evaluated.", count, name)
            return dict.fromkeys(MEASURED, float("nan"))
        return {figure: float(figures["pioneer"][figure].mean()) for figure in MEASURED}

    def player(self, name: str) -> str:
        """The LLM that answers under a name: the first for the `AVERAGE`, within `average`."""
        return self.settings.modules[0] if name == AVERAGE else name

    @contextmanager
    def average(self) -> Iterator[None]:
        """Meanwhile the first LLM holds the mean of all LLMs' weights, in learners and engines; then its own again.

        So the mean needs no engine of its own, and a runner that is restarted meanwhile gets what the others have. Both
        times checksums prove that engines hold what the learner does.
        """
        first = self.settings.modules[0]
        try:
            with self.learners.lent(first):
                self.runners.send_again(first)
                yield
        finally:
            self.runners.send_again(first)

    def measure(
        self, deals: Sequence[Deal], mapping: RoleMapping, split: Split
    ) -> tuple[list[Rollout], dict[str, dict[str, np.ndarray]]]:
        """Plays queries and measures every response.

        Args:
            deals: the queries. Sampling seeds follow from them and the settings' seed alone.
            mapping: all roles, or the first one alone, and who plays them.
            split: of the task.

        Returns:
            The rollouts, and by role what `measure_responses` gives for them: fp32 `[C]` each, in the order played;
            nothing where the reward failed on every query.
        """
        rollouts = self.runners.play(deals, stream=EVALUATION_STREAM, mapping=mapping, split=split)
        rows = rows_of([episode for rollout in rollouts for episode in rollout.episodes])
        scored = {name: rows[name] | scores for name, scores in self.learners.score(rows).items()}
        figures = {}
        for position, role in enumerate(mapping.roles) if scored else ():
            of_role = at_position(scored[mapping(role)], position)
            measured = measure_responses(of_role, self.settings.report_kl_coef)
            figures[role] = {key: column.numpy() for key, column in measured.items()}
        return rollouts, figures

    def samples(self, mapping: RoleMapping, count: int) -> list[dict[str, Any]]:
        """The chain on the first `count` validation queries, as text."""
        deals = [Deal(query) for query in range(min(count, len(self.task.queries("validation"))))]
        rollouts = self.runners.play(deals, stream=EVALUATION_STREAM, mapping=mapping, split="validation")
        return [sample for rollout in rollouts for sample in rollout.samples]
