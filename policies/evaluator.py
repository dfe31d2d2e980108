"""Evaluates policies on held-out queries."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cory_env.chain import Chain
from cory_env.tasks import Split, Task
from policies.generation.generator import EVALUATION_UPDATE
from policies.learning.metrics import RESPONSE_METRICS, compute_response_metrics, mean_metrics, nanmean
from policies.learning.rows import Rows, select_position, select_rows
from policies.models.language_model import left_padded
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
            settings: of the run.
            task: its queries.
            runners: generate responses.
            learners: compute log-probabilities of responses under policy and reference.
            sync_check: compares the runners' log-probabilities with the learners'.
        """
        self.settings = settings
        self.task = task
        self.tokenizers = settings.make_tokenizers()
        self._single_chains: dict[str, Chain] = {}
        """By policy id, the chain of that policy alone, whose prompt is the bare query."""
        self.runners = runners
        self.learners = learners
        self.sync_check = sync_check

    def evaluate(self) -> dict[str, Any]:
        """Evaluates each policy alone, and the chain's last response, on the validation queries.

        The chain runs in every order that role exchange produces, so each policy is the pioneer once. A pioneer gets
        the bare query, so its responses are those of the policy alone.

        Returns:
            `evaluation`: `{policy_id: {task_reward, kl, combined_reward, response_length, eos_rate, repetition}}` of
            each trained LLM on the bare query, NaN for one that never responds first (`roles` without exchange); with
            `eval_average` also of `AVERAGE_POLICY`; and the `mean` over the policies, without the average. NaN if the
            reward failed on every query (`on_reward_error: skip`).
            `last_response`, if later agents see earlier responses: the same metrics of each chain's last response, mean
            over the orders. With `stop_when`, that is the response at which the chain stopped. Its `kl` is to the
            reference on the bare query, which is what users of the chain get. Its `in_chain_kl` is to the reference in
            the agent's own prompt, as in training. That is optimistic, because the earlier responses in the prompt
            shift the reference too.
        """
        alone, last = {}, []
        cache: MetricsCache = {}
        for mapping in self.orders():
            pioneer = mapping(mapping.roles[0])
            metrics = self._mean_metrics(pioneer, mapping, cache)
            if pioneer in self.settings.policy_ids:
                alone[pioneer] = {name: metrics[mapping.roles[0]][name] for name in RESPONSE_METRICS}
            if len(mapping.roles) > 1:
                last.append(metrics[LAST_RESPONSE])
        mean = mean_metrics(list(alone.values()))
        no_metrics = dict.fromkeys(RESPONSE_METRICS, float("nan"))
        alone = {policy_id: alone.get(policy_id, no_metrics) for policy_id in self.settings.policy_ids}
        if self.settings.eval_average:
            with self.average() as mapping:
                alone[AVERAGE_POLICY] = self._mean_metrics(AVERAGE_POLICY, mapping, cache)[mapping.roles[0]]
        results = {"evaluation": {**alone, "mean": mean}}
        return {**results, "last_response": mean_metrics(last)} if last else results

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
                    role: dict.fromkeys((*RESPONSE_METRICS, "in_chain_kl"), np.full(1, np.nan))
                    for role in mapping.roles
                }
            groups = {**role_metrics, LAST_RESPONSE: last_response_metrics(list(role_metrics.values()))}
            cache[key] = {
                name: {metric: nanmean(values) for metric, values in metrics.items()}
                for name, metrics in groups.items()
            }
        return cache[key]

    def orders(self) -> list[RoleMapping]:
        """Returns the chain's mapping after every role exchange; each LLM alone if no agent sees earlier responses."""
        s = self.settings
        if s.num_agents > 1 and s.knowledge_transfer:
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
            split: of the task.

        Returns:
            The rollout, and by role the metrics of `compute_response_metrics`: fp32 `[C]` each, in the rollout's order,
            NaN for chains that stopped before the role; empty if the reward failed on every query. For the last
            response of a chain, `kl` is to the reference on the bare query, estimated from the sampled tokens; 0 for a
            frozen model. Roles that gave a last response also have `in_chain_kl`, to the reference on the role's own
            prompt. Without a KL weight (`Settings.evaluates_with_reference`), `kl` is NaN, and there is no
            `in_chain_kl`.
        """
        rollout = self.runners.generate(prompt_refs, update=EVALUATION_UPDATE, mapping=mapping, split=split)
        rows = rows_from_episodes(rollout.episodes)
        reference = self.settings.evaluates_with_reference
        scored = {
            policy_id: rows[policy_id] | scores
            for policy_id, scores in self.learners.score(rows, reference=reference).items()
        }
        for policy_id, scored_rows in scored.items():
            self.sync_check.check_rows(policy_id, scored_rows)
        role_metrics = {}
        lengths = torch.tensor([len(episode.agent_episodes) for episode in rollout.episodes])
        for position, role in enumerate(mapping.roles) if scored else ():
            role_metrics[role] = {name: np.full(len(lengths), np.nan, np.float32) for name in RESPONSE_METRICS}
            if mapping(role) not in scored:
                continue
            role_rows = select_position(scored[mapping(role)], position)
            metrics = compute_response_metrics(role_rows, self.settings.report_kl_coef)
            is_last = lengths[role_rows["chains"]] == position + 1
            if reference and len(mapping.roles) > 1 and is_last.any():
                metrics["in_chain_kl"] = metrics["kl"].clone()
            if reference and position and is_last.any() and mapping(role) in self.settings.policy_ids:
                last = select_rows(role_rows, is_last.nonzero().squeeze(1))
                metrics["kl"][is_last] = self._bare_query_kl(rollout, last, mapping(role), split)
                metrics["combined_reward"] = metrics["task_reward"] - self.settings.report_kl_coef * metrics["kl"]
            for name, column in metrics.items():
                role_metrics[role].setdefault(name, np.full(len(lengths), np.nan, np.float32))
                role_metrics[role][name][role_rows["chains"].numpy()] = column.numpy()
        return rollout, role_metrics

    def _bare_query_kl(self, rollout: Rollout, last: Rows, policy_id: str, split: Split) -> Tensor:
        """Returns the sampled KL of a policy's last responses to the reference prompted with the bare query."""
        queries = self.task.queries(split)
        if policy_id not in self._single_chains:
            self._single_chains[policy_id] = self.settings.make_chain(self.task, self.tokenizers, (policy_id,))
        chain = self._single_chains[policy_id]
        prompt_refs = [rollout.prompt_refs[index] for index in last["chains"].tolist()]
        prompts = chain.encode_pioneer_prompts([queries[prompt_ref.query] for prompt_ref in prompt_refs])
        rows = dict(zip(("prompts", "prompt_mask"), left_padded(prompts), strict=True))
        rows |= {name: last[name] for name in ("responses", "mask", "positions", "earlier_rewards")}
        (scores,) = self.learners.score({policy_id: rows}).values()
        return ((last["logprobs"] - scores["reference_logprobs"]) * last["mask"]).sum(1)

    def samples(self, mapping: RoleMapping, count: int) -> list[dict[str, Any]]:
        """Returns the chain's responses to the first `count` validation queries as text; see `to_text`."""
        prompt_refs = [PromptRef(query) for query in range(min(count, len(self.task.queries("validation"))))]
        return self.runners.generate(prompt_refs, update=EVALUATION_UPDATE, mapping=mapping, split="validation").samples


def last_response_metrics(role_metrics: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns the metrics of each chain's last response.

    Args:
        role_metrics: by position, the metrics of `Evaluator.measure`, `[C]` each.
    """
    last = {"in_chain_kl": role_metrics[0]["kl"], **role_metrics[0]}
    for metrics in role_metrics[1:]:
        has_responded = ~np.isnan(metrics["response_length"])
        last = {name: np.where(has_responded, metrics.get(name, values), values) for name, values in last.items()}
    return last
