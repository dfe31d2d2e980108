"""What one update shows: per policy, per role, and of the whole run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from policies.learning.measures import MEASURED
from policies.rollout.chain_runner import Rollout
from policies.rollout.role_mapping import RoleMapping

SAMPLES_SHOWN = 4
OF_ROLE = (*MEASURED, "task_reward_std", "explained_variance")
"""What is reported of a role, the last with a critic alone."""


def update_report(
    rollouts: Sequence[Rollout],
    mapping: RoleMapping,
    policy: Mapping[str, Mapping[str, float]],
    role: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """Puts together what an update showed, but for what the algorithm counts and times.

    Args:
        rollouts: what was played.
        mapping: who played which role, of several teams the first.
        policy: of each LLM what was measured of its responses and its learning.
        role: of each role what was measured of the responses in it.
    """
    return {
        "roles": mapping.as_dict(),
        "policy": policy,
        "role": {
            each: {name: figures[name] for name in OF_ROLE if name in figures} | _parts(rollouts, each)
            for each, figures in role.items()
        },
        "sampler_gap_mean": float(np.mean([figures["sampler_gap_mean"] for figures in policy.values()])),
        "sampler_gap_max": max(figures["sampler_gap_max"] for figures in policy.values()),
        "tokens": sum(rollout.tokens for rollout in rollouts),
        "truncated_prompts": sum(rollout.truncated_prompts for rollout in rollouts),
        "reward_errors": sum(rollout.reward_errors for rollout in rollouts),
        "samples": _samples(rollouts),
    }


def _parts(rollouts: Sequence[Rollout], role: str) -> dict[str, float]:
    """The mean of what each of several reward functions gave the responses of a role, as `reward/NAME`."""
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.reward_parts.get(role, {}))
    return {
        f"reward/{name}": float(np.mean([v for r in rollouts for v in r.reward_parts.get(role, {}).get(name, [])]))
        for name in names
    }


def _samples(rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
    """The first chains of a few queries, of as many teams as these can show."""
    by_players: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for rollout in rollouts:
        for dealt, sample in zip(rollout.deals, rollout.samples, strict=True):
            if dealt.sample == dealt.sibling == 0:
                players = tuple(response["policy"] for response in sample["responses"])
                by_players.setdefault(players, []).append(sample)
    each = SAMPLES_SHOWN // min(len(by_players), SAMPLES_SHOWN) if by_players else 0
    return [sample for samples in by_players.values() for sample in samples[:each]][:SAMPLES_SHOWN]
