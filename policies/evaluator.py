"""Evaluates policies on held-out queries."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cory_env.chain import Chain
from cory_env.tasks import Split, Task
from policies.generation.generator import EVALUATION_UPDATE
from policies.learning.metrics import RESPONSE_METRICS, compute_response_metrics, mean_metrics, nanmean
from policies.learning.rows import ScoredRows, Scores, left_padded
from policies.models.model_names import AVERAGE_POLICY
from policies.rllib.learners import Learners
from policies.rllib.token_batch import rows_from_episodes
from policies.rollout.episodes import Rollout
from policies.rollout.prompt_sampling import PromptRef
from policies.rollout.role_mapping import RoleMapping, make_orders
from policies.rollout.runners import Runners
from policies.settings.settings import Settings
from policies.sync_check import SyncCheck

logger = logging.getLogger(__name__)

MetricsCache = dict[tuple[tuple[str, str, int], ...], dict[str, dict[str, float]]]
"""Metrics by role, keyed by the chain's (role, model, checksum of the weights)."""

LAST_RESPONSE = "last_response"
"""Key of the metrics of each chain's last response, beside the roles."""


class Evaluator:
    """Evaluates the current weights, always on the same queries with the same seeds.

    Its methods raise RewardError, GenerationError, LearnerError and WeightSyncError, as an update does.
    """

    def __init__(
        self, settings: Settings, task: Task, runners: Runners, learners: Learners, sync_check: SyncCheck
    ) -> None:
        """Initializes the evaluator.

        Args:
            learners: compute log-probabilities of responses under policy and reference.
            sync_check: compares the runners' log-probabilities with the learners'.
        """
        self.settings = settings
        self.task = task
        self.tokenizers = settings.make_tokenizers()
        self._chains: dict[str, Chain] = {}
        """By policy id, a chain of that policy, for its prompts."""
        self.runners = runners
        self.learners = learners
        self.sync_check = sync_check

    def evaluate(self) -> dict[str, Any]:
        """Evaluates each policy alone, and the chain's last response, on the validation queries.

        The chain runs in every order that role exchange produces, so each policy is the pioneer once. A pioneer gets
        the bare query, which is the prompt of the first role, so its responses are those of the policy alone.

        Returns:
            `evaluation`: `{policy_id: {task_reward, kl, combined_reward, response_length, eos_rate, repetition}}` of
            each trained LLM on the bare query, NaN for one that never responds first (`roles` without exchange); with
            `eval_average` also of `AVERAGE_POLICY`; and the `mean` over the policies, without the average. NaN if the
            reward failed on every query (`on_reward_error: skip`).
            `last_response`, if later agents see earlier responses: the metrics of each chain's last response, mean over
            the orders; see `last_response_metrics`.
        """
        if self.settings.env is not None:
            return self._evaluate_episodes()
        alone, last = {}, []
        cache: MetricsCache = {}
        for mapping in self.orders():
            pioneer = mapping(mapping.agents[0])
            metrics = self._mean_metrics(pioneer, mapping, cache)
            if pioneer in self.settings.policy_ids:
                alone[pioneer] = {name: metrics[mapping.agents[0]][name] for name in RESPONSE_METRICS}
            if len(mapping.agents) > 1:
                last.append(metrics[LAST_RESPONSE])
        mean = mean_metrics(list(alone.values()))
        no_metrics = dict.fromkeys(RESPONSE_METRICS, float("nan"))
        alone = {policy_id: alone.get(policy_id, no_metrics) for policy_id in self.settings.policy_ids}
        if self.settings.eval_average:
            with self.average() as mapping:
                alone[AVERAGE_POLICY] = self._mean_metrics(AVERAGE_POLICY, mapping, cache)[mapping.agents[0]]
        results = {"evaluation": {**alone, "mean": mean}}
        return {**results, "last_response": mean_metrics(last)} if last else results

    def _evaluate_episodes(self) -> dict[str, Any]:
        """Returns `evaluation` of an environment's episodes: of each LLM, the mean over the agents that it was."""
        metrics: dict[str, list[dict[str, float]]] = {}
        cache: MetricsCache = {}
        for mapping in self.orders():
            by_agent = self._mean_metrics("the environment", mapping, cache)
            for agent, policy_id in mapping.as_dict().items():
                metrics.setdefault(policy_id, []).append(by_agent[agent])
        means = {policy_id: mean_metrics(metrics[policy_id]) for policy_id in self.settings.policy_ids}
        return {"evaluation": {**means, "mean": mean_metrics([*means.values()])}}

    def _mean_metrics(self, name: str, mapping: RoleMapping, cache: MetricsCache) -> dict[str, dict[str, float]]:
        """Returns the mean metrics of each role, and of the last responses, on the validation queries.

        `name` is for the warning.

        Policies often have equal weights, such as at the start or right after averaging. `cache` avoids evaluating the
        same weights twice.
        """
        key = tuple(
            (role, self.settings.all_models[policy_id], self.runners.sent_checksums.get(policy_id, 0))
            for role, policy_id in mapping.as_dict().items()
        )
        if key not in cache:
            count = min(self.settings.eval_queries, len(self.task.queries("validation")))
            _, role_metrics = self.measure([PromptRef(query) for query in range(count)], mapping, "validation")
            if not role_metrics:
                logger.warning("The reward failed on all %d held-out queries of %s: not evaluated.", count, name)
                role_metrics = {
                    role: dict.fromkeys((*RESPONSE_METRICS, "bare_kl"), np.full(1, np.nan)) for role in mapping.agents
                }
            groups = {**role_metrics}
            if len(mapping.agents) > 1 and self.settings.env is None:
                groups[LAST_RESPONSE] = last_response_metrics([*role_metrics.values()], self.settings.report_kl_coef)
            cache[key] = {
                name: {metric: nanmean(values) for metric, values in metrics.items()}
                for name, metrics in groups.items()
            }
        return cache[key]

    def orders(self) -> list[RoleMapping]:
        """Returns the chain's mapping after every role exchange; each LLM alone if no agent sees earlier responses."""
        s = self.settings
        if s.env is not None or (s.num_agents > 1 and s.knowledge_transfer):
            return make_orders(s)
        return [RoleMapping(s.agents[:1], (policy_id,)) for policy_id in s.pioneers]

    @contextmanager
    def average(self) -> Iterator[RoleMapping]:
        """Swaps the mean of all policies' weights into the first policy, and restores its own weights on exit.

        The mean therefore needs no engine of its own, and a runner that restarts in between gets the same weights as
        the others. Checksums verify the engines' weights both times.

        Yields:
            The mapping of the first policy alone.
        """
        first = self.settings.policy_ids[0]
        try:
            with self.learners.temporary_average(first):
                self.runners.sync_weights(self.runners.version, [first])
                yield RoleMapping(self.settings.agents[:1], (first,))
        finally:
            self.runners.sync_weights(self.runners.version, [first])

    def measure(
        self, prompt_refs: Sequence[PromptRef], mapping: RoleMapping, split: Split
    ) -> tuple[Rollout, dict[str, dict[str, np.ndarray]]]:
        """Generates responses to queries and measures each of them.

        Args:
            prompt_refs: the queries. Sampling seeds depend only on them and the `seed` setting.
            mapping: which policy has which role: all roles, or the pioneer alone.

        Returns:
            The rollout, and by role the metrics of `compute_response_metrics`: fp32 `[C]` each, in the rollout's order,
            NaN for chains that stopped before the role; empty if the reward failed on every query. `kl` is to the
            reference in the response's own prompt, over the whole vocabulary. In a chain of several roles, last
            responses also have `bare_kl`, to the reference on the bare query, from the sampled tokens; after other
            responses it replaces `kl` in `combined_reward`. Both are 0 for a frozen model, and NaN without a KL weight
            (`Settings.evaluates_with_reference`).
        """
        rollout = self.runners.generate(prompt_refs, update=EVALUATION_UPDATE, mapping=mapping, split=split)
        rows = rows_from_episodes(rollout.episodes)
        reference = self.settings.evaluates_with_reference
        scored = {
            policy_id: rows[policy_id].with_scores(scores)
            for policy_id, scores in self.learners.score(rows, reference=reference).items()
        }
        for policy_id, scored_rows in scored.items():
            self.sync_check.check_rows(policy_id, scored_rows)
        role_metrics = {}
        lengths = torch.tensor([len(episode.agent_episodes) for episode in rollout.episodes])
        for position, role in enumerate(mapping.agents) if scored else ():
            names = (*RESPONSE_METRICS, *(["bare_kl"] if len(mapping.agents) > 1 and self.settings.env is None else []))
            role_metrics[role] = {name: np.full(len(lengths), np.nan, np.float32) for name in names}
            if mapping(role) not in scored:
                continue
            role_rows = scored[mapping(role)].at_position(position)
            metrics = compute_response_metrics(role_rows, self.settings.report_kl_coef)
            if role_rows.turns is not None:
                for name, column in metrics.items():
                    role_metrics[role][name][role_rows.chains.unique().numpy()] = column.numpy()
                continue
            is_last = lengths[role_rows.chains] == position + 1
            if reference and len(mapping.agents) > 1 and is_last.any():
                last = role_rows.select(is_last)
                metrics["bare_kl"] = torch.full_like(metrics["kl"], torch.nan)
                metrics["bare_kl"][is_last] = self._bare_kl(rollout, last, mapping(role), split, is_bare=position == 0)
                if position:
                    combined = metrics["task_reward"] - self.settings.report_kl_coef * metrics["bare_kl"]
                    metrics["combined_reward"] = torch.where(is_last, combined, metrics["combined_reward"])
            for name, column in metrics.items():
                role_metrics[role][name][role_rows.chains.numpy()] = column.numpy()
        return rollout, role_metrics

    def _bare_kl(self, rollout: Rollout, last: ScoredRows, policy_id: str, split: Split, *, is_bare: bool) -> Tensor:
        """Returns the sampled KL of a policy's last responses to the reference on the bare query.

        `is_bare`: the responses are to the bare query. A frozen model is its own reference.
        """
        scores: Scores = last
        if not is_bare and policy_id in self.settings.policy_ids:
            queries = self.task.queries(split)
            if policy_id not in self._chains:
                policy_ids = (policy_id,) * self.settings.num_agents
                self._chains[policy_id] = self.settings.make_chain(self.task, self.tokenizers, policy_ids)
            prompt_refs = [rollout.prompt_refs[index] for index in last.chains.tolist()]
            chain = self._chains[policy_id]
            bare_queries = [queries[ref.query] for ref in prompt_refs]
            prompts = chain.encoders[0].encode_prompts(bare_queries, template=chain.bare_template)
            tokens, mask = left_padded(prompts)
            (scores,) = self.learners.score({policy_id: replace(last, prompts=tokens, prompt_mask=mask)}).values()
        assert scores.reference_logprobs is not None
        return ((last.logprobs - scores.reference_logprobs) * last.mask).sum(1)

    def samples(self, mapping: RoleMapping, count: int) -> list[dict[str, Any]]:
        """Returns the chain's responses to the first `count` validation queries as text; see `to_text`."""
        prompt_refs = [PromptRef(query) for query in range(min(count, len(self.task.queries("validation"))))]
        return self.runners.generate(prompt_refs, update=EVALUATION_UPDATE, mapping=mapping, split="validation").samples


def last_response_metrics(role_metrics: Sequence[dict[str, np.ndarray]], kl_coef: float) -> dict[str, np.ndarray]:
    """Returns the metrics of each chain's last response: with `stop_when`, of the one at which it stopped.

    Args:
        role_metrics: by position, the metrics of `Evaluator.measure`, `[C]` each.

    Returns:
        Instead of `kl`, `bare_kl`, to the reference on the bare query, which is what users of the chain get; it is in
        the combined reward. And `in_chain_kl`, to the reference in the agent's own prompt, as in training. That is
        optimistic, because the earlier responses in the prompt shift the reference too.
    """
    last = {**role_metrics[0]}
    if kl_coef:
        last["combined_reward"] = last["task_reward"] - kl_coef * last["bare_kl"]
    for metrics in role_metrics[1:]:
        has_responded = ~np.isnan(metrics["response_length"])
        last = {name: np.where(has_responded, metrics[name], values) for name, values in last.items()}
    return {"in_chain_kl" if name == "kl" else name: values for name, values in last.items()}
