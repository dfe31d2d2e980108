"""Measures policies on queries that nothing is learned from."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from cory_env.tasks import Split, Task
from policies.generation.generator import EVALUATION_STREAM
from policies.learning.measures import MEASURED, measure_responses
from policies.learning.rows import at_position
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
            `{llm: {task_reward, kl, combined_reward, response_length, eos_rate, repetition}}`, and their `mean`; NaN
            where the reward failed on every query (`on_reward_error: skip`).
        """
        count = min(self.settings.eval_queries, len(self.task.queries("validation")))
        deals = [Deal(query) for query in range(count)]
        out: dict[str, dict[str, float]] = {}
        for module_id in self.settings.modules:
            _, figures = self.measure(deals, RoleMapping(("pioneer",), (module_id,)), "validation")
            if not figures:
                logger.warning("The reward failed on all %d held-out queries of %s: not evaluated.", count, module_id)
                out[module_id] = dict.fromkeys(MEASURED, float("nan"))
                continue
            out[module_id] = {name: float(figures["pioneer"][name].mean()) for name in MEASURED}
        mean = {name: float(np.mean([each[name] for each in out.values()])) for name in MEASURED}
        return {**out, "mean": mean}

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
