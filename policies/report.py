"""The report of one update: metrics per policy, per role, and of the whole run."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NotRequired, TypedDict

import numpy as np
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    EPISODE_RETURN_MEAN,
    LEARNER_RESULTS,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
)
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from policies.learning.metrics import (
    LOGPROB_DIFF,
    NO_METRICS,
    RESPONSE_METRICS,
    SAMPLER_METRICS,
    compute_metrics,
    mean_metrics,
)
from policies.learning.rows import ScoredRows
from policies.rollout.episodes import Rollout
from policies.rollout.role_mapping import RoleMapping
from policies.settings.settings import Settings

NUM_SAMPLES = 4
_COUNTERS = (
    *("truncated_prompts", "truncated_episodes", "dropped_chains", "skipped_batches", "replaced_queries"),
    "discarded_tokens",
)
"""Counters of a rollout that are reported unchanged; `truncated_episodes` only with `env`."""
LOGPROB_DIFFS = ("logprob_diff_mean", "logprob_diff_max")
ROLE_METRICS = (*RESPONSE_METRICS, "kl_k3", "task_reward_std", "thought_cut_rate", "explained_variance")
"""Metrics of a role that are reported if they exist."""


class Report(TypedDict):
    """The report of one update."""

    update: int
    """Number of finished updates, including this one."""
    roles: dict[str, str]
    """Role → policy id."""
    policy: dict[str, dict[str, float]]
    """Policy id → means over its responses: `task_reward`, `kl` (to the reference, in nats per response),
    `combined_reward` (task reward minus `eval_kl_coef` times KL), `response_length` (tokens), `eos_rate`, `repetition`;
    with `thinking` also `thought_cut_rate`; and training metrics such as `policy_loss`, `clip_fraction`, `grad_norm`,
    `kl_coef`."""
    role: dict[str, dict[str, float]]
    """Role → the same means over its responses; several reward functions also as `reward/NAME`."""
    exchanged: bool
    """Whether roles were exchanged after the update."""
    exchanges: int
    """Number of role exchanges so far."""
    averaged: bool
    """Whether the LLMs' weights were averaged after the update."""
    logprob_diff_mean: float
    """Mean absolute difference between the sampler's and the learner's log-probability of a token; NaN if only frozen
    models responded."""
    logprob_diff_max: float
    """Maximum absolute difference between the sampler's and the learner's log-probability of a token, or NaN."""
    weight_version_lag: int
    """Age of the sampler's weights, in updates, relative to the learner's."""
    tokens: int
    """Generated tokens."""
    tokens_per_second: float
    """Generated tokens per second of rollout."""
    truncated_prompts: int
    """Prompts whose reference was truncated."""
    truncated_episodes: NotRequired[int]
    """With `env`: episodes that were cut off, by the environment, at `max_turns`, or at `max_prompt_tokens`."""
    dropped_chains: int
    """Chains dropped because a reward failed (`on_reward_error=skip`), including those of skipped batches."""
    skipped_batches: int
    """Batches of queries skipped before this update because all rewards of an LLM failed."""
    replaced_queries: int
    """Queries replaced because all rewards of each group were equal (`dynamic_sampling`)."""
    discarded_tokens: int
    """Response tokens to replaced queries; `tokens` includes them."""
    samples: list[dict[str, Any]]
    """A few chains: `query`, and `responses` with `role`, `policy`, `text` and `task_reward`."""
    health: list[dict[str, Any]]
    """Active warnings (docs/faq.md): `signature`, `subject`, `text`, `updates`."""
    collapsed: bool
    """Whether a warning means that an LLM has collapsed."""
    evaluation: NotRequired[dict[str, dict[str, float]]]
    """At each evaluation: policy id → metrics on held-out queries without a chain, and `mean` over the LLMs."""
    last_response: NotRequired[dict[str, float]]
    """At each evaluation: metrics of the chain's last response to the same queries."""
    seconds: dict[str, float]
    """Phase → seconds: `rollout`, `reward`, `learn`, `sync`, `evaluate` and `total`."""


def log_update(
    metrics: MetricsLogger,
    rollout: Rollout,
    policy_metrics: dict[str, dict[str, float]],
    results: list[dict[str, Any]],
    settings: Settings,
) -> None:
    """Logs an update to RLlib's results, and adds the learners' results to the policies' metrics.

    Args:
        policy_metrics: policy id → metrics; modified in place.
    """
    metrics.aggregate(results, key=LEARNER_RESULTS)
    returns = float(np.mean([episode.get_return() for episode in rollout.episodes]))
    metrics.log_value((ENV_RUNNER_RESULTS, EPISODE_RETURN_MEAN), returns, window=1)
    steps = sum(len(agent) for episode in rollout.episodes for agent in episode.agent_episodes.values())
    metrics.log_value((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), steps, reduce="lifetime_sum")
    h = settings.hyperparameters
    keys = (*h.loss_metrics, "grad_norm", *(() if h.scores_policy else (*SAMPLER_METRICS, *LOGPROB_DIFF)))
    for policy_id, values in policy_metrics.items():
        metrics.log_dict(values, key=(LEARNER_RESULTS, policy_id), window=1)
        values |= {key: float(metrics.peek((LEARNER_RESULTS, policy_id, key))) for key in keys}


def measure_roles(
    rows: Mapping[str, ScoredRows], mapping: RoleMapping, eval_kl_coef: float
) -> dict[str, dict[str, float]]:
    """Returns role → metrics of its responses, as from `compute_metrics`; means over the teams.

    A role without responses, because all chains stopped before it, has `NO_METRICS`.
    """

    def measure(role: str, position: int) -> dict[str, float]:
        policy_ids = [policy_id for policy_id in (team(role) for team in mapping.teams()) if policy_id in rows]
        parts = [rows[policy_id].at_position(position) for policy_id in policy_ids]
        return mean_metrics([compute_metrics(part, eval_kl_coef) for part in parts if len(part)])

    return {role: measure(role, position) for position, role in enumerate(mapping.agents)}


def update_report(
    rollout: Rollout,
    update: int,
    mapping: RoleMapping,
    policy: Mapping[str, Mapping[str, float]],
    role: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """Builds an update's report, without the algorithm's counters and timers.

    Args:
        update: its index from 0, which is the version of its initial weights.
        policy: policy id → metrics of its responses and training; policies without responses are absent.
    """
    counters, samples = rollout.counters, rollout.samples
    diffs = {name: [metrics[name] for metrics in policy.values()] or [math.nan] for name in LOGPROB_DIFFS}
    return {
        "roles": mapping.as_dict(),
        "policy": {policy_id: policy.get(policy_id, NO_METRICS) for policy_id in mapping.policy_ids},
        "role": {
            name: {key: metrics[key] for key in ROLE_METRICS if key in metrics} | _reward_means(samples, name)
            for name, metrics in role.items()
        },
        "logprob_diff_mean": float(np.mean(diffs["logprob_diff_mean"])),
        "logprob_diff_max": max(diffs["logprob_diff_max"]),
        "weight_version_lag": update - counters["version"],
        "tokens": counters["tokens"],
        "tokens_per_second": counters["tokens"] / counters["rollout_seconds"],
        **{name: counters[name] for name in _COUNTERS if name in counters},
        "samples": _samples(rollout),
    }


class PhaseTimer:
    """Measures the seconds of each phase of an update."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time spent in the context to a phase."""
        started = time.perf_counter()
        yield
        self._phases[name] = self._phases.get(name, 0.0) + time.perf_counter() - started

    def seconds(self, counters: Mapping[str, float]) -> dict[str, float]:
        """Returns phase → seconds and the `total`, with the time of rewards subtracted from `rollout`."""
        waited, reward_seconds = self._phases["rollout"], counters["reward_seconds"]
        # With prefetching, the wait is shorter than the rollout.
        reward = reward_seconds * min(1.0, waited / (counters["rollout_seconds"] + reward_seconds))
        phases = {**self._phases, "rollout": waited - reward, "reward": reward}
        return {**phases, "total": time.perf_counter() - self._started}


def _reward_means(samples: Sequence[Mapping[str, Any]], role: str) -> dict[str, float]:
    """Returns `reward/NAME` → mean over a role's responses, for each of several reward functions."""
    values: dict[str, list[float]] = {}
    for response in (response for sample in samples for response in sample["responses"] if response["role"] == role):
        for name, value in response.get("rewards", {}).items():
            values.setdefault(f"reward/{name}", []).append(value)
    return {name: float(np.mean(rewards)) for name, rewards in values.items()}


def _samples(rollout: Rollout) -> list[dict[str, Any]]:
    """Returns the first chains of a few queries, from as many teams as possible."""
    by_team: dict[str, list[dict[str, Any]]] = {}  # by the pioneer's LLM, as stopped chains lack other roles
    for prompt_ref, sample in zip(rollout.prompt_refs, rollout.samples, strict=True):
        if prompt_ref.sample == 0:
            by_team.setdefault(sample["responses"][0]["policy"], []).append(sample)
    per_team = NUM_SAMPLES // min(len(by_team), NUM_SAMPLES) if by_team else 0
    return [sample for samples in by_team.values() for sample in samples[:per_team]][:NUM_SAMPLES]
