"""What one update shows: per policy, per role, and of the whole run."""

from __future__ import annotations

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

from policies.learning.metrics import RESPONSE_METRICS, mean_metrics, measure
from policies.learning.rows import Rows, at_position
from policies.rollout.episodes import Rollout
from policies.rollout.role_mapping import RoleMapping
from policies.settings.settings import Settings

SAMPLES_SHOWN = 4
OF_ROLE = (*RESPONSE_METRICS, "task_reward_std", "explained_variance")
"""What is reported of a role, the last with a critic alone."""


class Report(TypedDict):
    """What one update showed."""

    update: int
    """Updates that are done, this one included."""
    roles: dict[str, str]
    """Who played which role: by role, the LLM."""
    policy: dict[str, dict[str, float]]
    """By LLM, means over its responses: `task_reward`, `kl` (to the reference, in nats a response), `combined_reward`
    (task reward less `eval_kl_coef` times KL), `response_length` (tokens), `eos_rate`, `repetition`; and of its
    learning, such as `policy_loss`, `clip_fraction`, `grad_norm`, `kl_coef`."""
    role: dict[str, dict[str, float]]
    """By role, the same means over the responses in it; of several reward functions each as `reward/NAME`."""
    exchanged: bool
    """After it roles were exchanged."""
    exchanges: int
    """Exchanges so far."""
    averaged: bool
    """After it all LLMs moved to the mean of their weights."""
    logprob_diff_mean: float
    """Mean absolute difference of the sampler's and the learner's log-probability of a token."""
    logprob_diff_max: float
    """The largest such difference."""
    weight_version_lag: int
    """Updates by which the weights that played were older than those that learned."""
    tokens: int
    """That were generated."""
    tokens_per_second: float
    """These, by the seconds that were spent on playing."""
    truncated_prompts: int
    """In which the reference was cut to fit."""
    dropped_chains: int
    """Chains that were dropped because a reward failed (`on_reward_error=skip`), those of skipped batches included."""
    skipped_batches: int
    """Batches of queries that were skipped before this update, because all rewards of some LLM failed."""
    samples: list[dict[str, Any]]
    """A few chains: `query`, and `responses` with `role`, `policy`, `text` and `task_reward`."""
    health: list[dict[str, Any]]
    """Warnings that stand (docs/health.md): `signature`, `of`, `text`, `num_updates`."""
    collapsed: bool
    """One of them says that an LLM has collapsed."""
    evaluation: NotRequired[dict[str, dict[str, float]]]
    """At every `eval_every`-th update and the last: by LLM, alone on held-out queries, and the `mean` over them."""
    last_response: NotRequired[dict[str, float]]
    """Then too: of the chain's last answer to the same queries."""
    seconds: dict[str, float]
    """By phase: `rollout`, `reward`, `learn`, `sync`, `evaluate`, and the `total`."""


def log_update(
    metrics: MetricsLogger,
    rollout: Rollout,
    figures: dict[str, dict[str, float]],
    results: list[dict[str, Any]],
    settings: Settings,
) -> None:
    """Logs an update where RLlib's own results show it, and completes the figures of the LLMs.

    Args:
        metrics: of the algorithm.
        rollout: what was played.
        figures: by LLM; those of its learning are added.
        results: of the learners.
        settings: of the run.
    """
    metrics.aggregate(results, key=LEARNER_RESULTS)
    returns = float(np.mean([episode.get_return() for episode in rollout.episodes]))
    metrics.log_value((ENV_RUNNER_RESULTS, EPISODE_RETURN_MEAN), returns, window=1)
    steps = len(rollout.episodes) * settings.num_agents
    metrics.log_value((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), steps, reduce="lifetime_sum")
    learned = ("policy_loss", "clip_fraction", "grad_norm", *(("value_loss",) if settings.critic else ()))
    for name, each in figures.items():
        metrics.log_dict(each, key=(LEARNER_RESULTS, name), window=1)
        each |= {key: float(metrics.peek((LEARNER_RESULTS, name, key))) for key in learned}


def measure_roles(rows: Mapping[str, Rows], mapping: RoleMapping, eval_kl_coef: float) -> dict[str, dict[str, float]]:
    """What `measure` gives of the responses in each role, by role: means over the teams.

    Args:
        rows: by LLM, scored, with estimated returns.
        mapping: who played which role.
        eval_kl_coef: as of `measure`.
    """
    teams = mapping.teams()
    return {
        role: mean_metrics([measure(at_position(rows[team(role)], position), eval_kl_coef) for team in teams])
        for position, role in enumerate(mapping.roles)
    }


def update_report(
    rollout: Rollout,
    update: int,
    mapping: RoleMapping,
    policy: Mapping[str, Mapping[str, float]],
    role: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """Puts together what an update showed, but for what the algorithm counts and times.

    Args:
        rollout: what was played, by all teams.
        update: its number, from 0, which is the version of the weights that it began with.
        mapping: who played which role, of several teams the first.
        policy: of each LLM what was measured of its responses and its learning.
        role: of each role what was measured of the responses in it.
    """
    counters, samples = rollout.counters, rollout.samples
    return {
        "roles": mapping.as_dict(),
        "policy": policy,
        "role": {
            each: {name: figures[name] for name in OF_ROLE if name in figures} | _parts(samples, each)
            for each, figures in role.items()
        },
        "logprob_diff_mean": float(np.mean([figures["logprob_diff_mean"] for figures in policy.values()])),
        "logprob_diff_max": max(figures["logprob_diff_max"] for figures in policy.values()),
        "weight_version_lag": update - counters["version"],
        "tokens": counters["tokens"],
        "tokens_per_second": counters["tokens"] / counters["rollout_seconds"],
        **{name: counters[name] for name in ("truncated_prompts", "dropped_chains", "skipped_batches")},
        "samples": _samples(rollout),
    }


class PhaseTimer:
    """Takes the seconds of one update, by phase."""

    def __init__(self) -> None:
        """Starts the total."""
        self._started = time.perf_counter()
        self._phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time until it is left to a phase."""
        started = time.perf_counter()
        yield
        self._phases[name] = self._phases.get(name, 0.0) + time.perf_counter() - started

    def seconds(self, counters: Mapping[str, float]) -> dict[str, float]:
        """Returns the seconds by phase and the `total`, with those of rewards taken out of `rollout`.

        Args:
            counters: of the update's rollout.
        """
        waited, rewarding = self._phases["rollout"], counters["reward_seconds"]
        # Of what was prefetched, less was waited for.
        reward = rewarding * min(1.0, waited / (counters["rollout_seconds"] + rewarding))
        phases = {**self._phases, "rollout": waited - reward, "reward": reward}
        return {**phases, "total": time.perf_counter() - self._started}


def _parts(samples: Sequence[Mapping[str, Any]], role: str) -> dict[str, float]:
    """The mean of what each of several reward functions gave the responses of a role, as `reward/NAME`."""
    values: dict[str, list[float]] = {}
    for response in (response for sample in samples for response in sample["responses"] if response["role"] == role):
        for name, value in response.get("rewards", {}).items():
            values.setdefault(f"reward/{name}", []).append(value)
    return {name: float(np.mean(given)) for name, given in values.items()}


def _samples(rollout: Rollout) -> list[dict[str, Any]]:
    """The first chains of a few queries, of as many teams as these can show."""
    by_players: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for prompt_ref, sample in zip(rollout.prompt_refs, rollout.samples, strict=True):
        if prompt_ref.sample == prompt_ref.sibling == 0:
            policy_ids = tuple(response["policy"] for response in sample["responses"])
            by_players.setdefault(policy_ids, []).append(sample)
    each = SAMPLES_SHOWN // min(len(by_players), SAMPLES_SHOWN) if by_players else 0
    return [sample for samples in by_players.values() for sample in samples[:each]][:SAMPLES_SHOWN]
