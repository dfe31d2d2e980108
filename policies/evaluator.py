"""Measures policies on queries that nothing is learned from."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor

from cory_env.chain import Chain
from cory_env.tasks import Split, Task
from policies.generation.generator import EVALUATION_STREAM
from policies.learning.metrics import RESPONSE_METRICS, mean_metrics, measure_responses
from policies.learning.rows import Rows, at_position
from policies.models.language_model import left_padded
from policies.models.model_names import AVERAGE
from policies.rllib.learners import Learners
from policies.rllib.token_batch import rows_of
from policies.rollout.episodes import Rollout
from policies.rollout.prompt_sampling import PromptRef
from policies.rollout.role_mapping import RoleMapping
from policies.rollout.runners import Runners
from policies.settings.settings import Settings
from policies.sync_check import SyncCheck

logger = logging.getLogger(__name__)

Known = dict[tuple[tuple[str, str, int], ...], dict[str, dict[str, float]]]
"""Means by role, of chains that were played: by role, its policy_id's model and the checksum of the weights."""


class Evaluator:
    """Lets the present weights answer; always the same queries with the same seeds.

    Its methods raise RewardError, GenerationError, LearnerError and WeightSyncError, as an update does.
    """

    def __init__(
        self, settings: Settings, task: Task, runners: Runners, learners: Learners, sync_check: SyncCheck
    ) -> None:
        """Takes who plays, who knows how likely a response is, and what compares the two."""
        self.settings = settings
        self.task = task
        self.tokenizers = settings.make_tokenizers()
        self._bare: dict[str, Chain] = {}
        self.runners = runners
        self.learners = learners
        self.sync_check = sync_check

    def held_out(self) -> dict[str, Any]:
        """Evaluation in training, on the validation queries: each policy alone, and the chain's last answer.

        The chain is played in every order that role exchange brings, so each policy is its pioneer once, who answers as
        it does alone.

        Returns:
            `evaluation`: `{llm: {task_reward, kl, combined_reward, response_length, eos_rate, repetition}}` of each
            policy on the bare query; with `eval_average` those of the `AVERAGE` of the LLMs; and the `mean` of the
            LLMs' figures, which the average has no part in. NaN where the reward failed on every query
            (`on_reward_error: skip`). `last_response`, where later agents see the earlier responses: the same figures
            of
            the last answer, a mean over the orders. Its `kl` is to the reference on the bare query, which is what
            someone who asks the chain gets, and `in_chain_kl` to the reference in the last agent's prompt, as it is
            trained: that flatters, as what stands in the prompt has moved the reference too.
        """
        alone, last = {}, []
        known: Known = {}
        for name in self.settings.policy_ids:
            mapping = self.with_pioneer(name)
            figures = self._means(name, mapping, known)
            alone[name] = {figure: figures[mapping.roles[0]][figure] for figure in RESPONSE_METRICS}
            if len(mapping.roles) > 1:
                last.append(figures[mapping.roles[-1]])
        mean = mean_metrics(list(alone.values()))
        if self.settings.eval_average:
            with self.average() as mapping:
                alone[AVERAGE] = self._means(AVERAGE, mapping, known)[mapping.roles[0]]
        found = {"evaluation": {**alone, "mean": mean}}
        return {**found, "last_response": mean_metrics(last)} if last else found

    def _means(self, name: str, mapping: RoleMapping, known: Known) -> dict[str, dict[str, float]]:
        """Means of each role's figures on the validation queries, by role; `name` is whom a warning names.

        Players with the weights of those in `known`, as at the start or right after all were averaged, answer alike, so
        are not asked again.
        """
        policy_ids = tuple(
            (role, self.settings.models[llm], self.runners.sent[llm]) for role, llm in mapping.as_dict().items()
        )
        if policy_ids not in known:
            count = min(self.settings.eval_queries, len(self.task.queries("validation")))
            _, figures = self.measure([PromptRef(query) for query in range(count)], mapping, "validation")
            if not figures:
                logger.warning("The reward failed on all %d held-out queries of %s: not evaluated.", count, name)
                figures = {
                    role: dict.fromkeys((*RESPONSE_METRICS, "in_chain_kl"), np.full(1, np.nan))
                    for role in mapping.roles
                }
            known[policy_ids] = {
                role: {key: float(each.mean()) for key, each in of.items()} for role, of in figures.items()
            }
        return known[policy_ids]

    def with_pioneer(self, name: str) -> RoleMapping:
        """Who plays when an LLM is the pioneer: the chain, or that LLM alone where nobody sees its response."""
        s = self.settings
        if s.num_agents > 1 and s.knowledge_transfer:
            return RoleMapping(s.roles, s.policy_ids).with_pioneer(name)
        return RoleMapping(("pioneer",), (name,))

    @contextmanager
    def average(self) -> Iterator[RoleMapping]:
        """Meanwhile the first LLM holds the mean of all LLMs' weights, in learners and engines; then its own again.

        So the mean needs no engine of its own, and a runner that is restarted meanwhile gets what the others have. Both
        times checksums prove that engines hold what the learner does.

        Yields:
            Who plays: it alone.
        """
        first = self.settings.policy_ids[0]
        try:
            with self.learners.lent(first):
                self.runners.send(self.runners.version, [first])
                yield RoleMapping(("pioneer",), (first,))
        finally:
            self.runners.send(self.runners.version, [first])

    def measure(
        self, prompt_refs: Sequence[PromptRef], mapping: RoleMapping, split: Split
    ) -> tuple[Rollout, dict[str, dict[str, np.ndarray]]]:
        """Plays queries and measures every response.

        Args:
            prompt_refs: the queries. Sampling seeds follow from them and the settings' seed alone.
            mapping: all roles, or the first one alone, and who plays them.
            split: of the task.

        Returns:
            The rollout, and by role what `measure_responses` gives for them: fp32 `[C]` each, in the order played;
            nothing where the reward failed on every query. Of a chain's last role `kl` is to the reference on the bare
            query, from the sampled tokens, and `in_chain_kl` to that in the role's own prompt.
        """
        rollout = self.runners.play(prompt_refs, stream=EVALUATION_STREAM, mapping=mapping, split=split)
        rows = rows_of(rollout.episodes)
        scored = {name: rows[name] | scores for name, scores in self.learners.score(rows).items()}
        for name, each in scored.items():
            self.sync_check.check_rows(name, each)
        figures = {}
        for position, role in enumerate(mapping.roles) if scored else ():
            of_role = at_position(scored[mapping(role)], position)
            measured = measure_responses(of_role, self.settings.report_kl_coef)
            if position == len(mapping.roles) - 1 > 0:
                measured["in_chain_kl"], measured["kl"] = (
                    measured["kl"],
                    self._bare_kl(rollout, of_role, mapping, split),
                )
                measured["combined_reward"] = measured["task_reward"] - self.settings.report_kl_coef * measured["kl"]
            figures[role] = {key: column.numpy() for key, column in measured.items()}
        return rollout, figures

    def _bare_kl(self, rollout: Rollout, last: Rows, mapping: RoleMapping, split: Split) -> Tensor:
        """KL of the last responses to the reference that is asked the bare query; `[C]`, sampled."""
        policy_id, queries = mapping(mapping.roles[-1]), self.task.queries(split)
        if policy_id not in self._bare:
            self._bare[policy_id] = self.settings.make_chain(self.task, self.tokenizers, (policy_id,))
        prompts = self._bare[policy_id].encode_first([queries[prompt_ref.query] for prompt_ref in rollout.prompt_refs])
        asked = dict(zip(("prompts", "prompt_mask"), left_padded(prompts), strict=True))
        asked |= {name: last[name] for name in ("responses", "mask", "positions", "earlier_rewards")}
        (scores,) = self.learners.score({policy_id: asked}).values()
        return ((last["logprobs"] - scores["reference_logprobs"]) * last["mask"]).sum(1)

    def samples(self, mapping: RoleMapping, count: int) -> list[dict[str, Any]]:
        """The chain on the first `count` validation queries, as text."""
        prompt_refs = [PromptRef(query) for query in range(min(count, len(self.task.queries("validation"))))]
        return self.runners.play(prompt_refs, stream=EVALUATION_STREAM, mapping=mapping, split="validation").samples
