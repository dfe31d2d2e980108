"""Dynamic sampling (DAPO, Yu et al. 2025, arXiv 2503.14476, §3.2): replaces queries that teach nothing.

A query teaches nothing if all its groups, in every role, are zero-variance groups: apart from the KL penalty, all its
advantages are 0. DAPO samples whole batches until enough other queries are found, and discards the rest. Here each
round generates only as many queries as are missing, so fewer tokens are discarded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ray.rllib.env.multi_agent_episode import MultiAgentEpisode

from policies.learning.advantages import has_nonzero_std
from policies.learning.credit import assign_credit, assign_part_credit
from policies.learning.estimation import AdvantageEstimator
from policies.learning.hyperparameters import Credit
from policies.rllib.token_batch import rows_from_episodes
from policies.rollout.episodes import Rollout, concat_rollouts


def zero_std_queries(rollout: Rollout, credit: Credit, estimators: Mapping[str, AdvantageEstimator]) -> set[int]:
    """Returns the queries whose groups have zero reward variance in all roles.

    Rewards are those after credit assignment, without the KL penalty. So a query is kept if credit assignment gives
    the responses of a role different rewards, although their own task rewards are equal.

    Args:
        estimators: advantage estimators by policy id, without critics.
    """
    if not rollout.episodes:
        return set()
    rows = rows_from_episodes(rollout.episodes)  # not scored, so there is no KL
    queries = [prompt_ref.query for prompt_ref in rollout.prompt_refs]
    useful_queries: set[int] = set()
    weights = next((estimator.hyperparameters.gdpo_weights for estimator in estimators.values()), ())
    credited = (
        assign_part_credit(rows, credit, estimators, weights) if weights else assign_credit(rows, credit, estimators)
    )
    for policy_id in estimators.keys() & rows.keys():  # frozen models learn nothing
        members, groups, lookup = rows[policy_id].comparisons()
        is_kept = has_nonzero_std(credited[policy_id][members], groups)[lookup]
        useful_queries |= {queries[chain] for chain in rows[policy_id].chains[is_kept].tolist()}
    return set(queries) - useful_queries


def group_by_query(rollout: Rollout, samples: int) -> dict[tuple[int, int], list[MultiAgentEpisode]]:
    """Groups the chains that answer a query, in the update's order, which may contain a query twice.

    Args:
        samples: number of chains per query.
    """
    groups: dict[tuple[int, int], list[MultiAgentEpisode]] = {}
    for prompt_ref, episode in zip(rollout.prompt_refs, rollout.episodes, strict=True):
        groups.setdefault((prompt_ref.query, prompt_ref.sample // samples), []).append(episode)
    return groups


def replace_queries(
    rollout: Rollout, replaced: set[int], new: Rollout, samples: int
) -> tuple[Rollout, list[MultiAgentEpisode]]:
    """Replaces queries by new ones, which take their places in the update's order.

    A new query without chains, because its reward failed, replaces nothing. There may be fewer new queries than places.

    Returns:
        The rollout, with the counters of both, and the chains that were replaced.
    """
    new_groups = iter(group_by_query(new, samples).values())
    episodes: list[MultiAgentEpisode] = []
    discarded: list[MultiAgentEpisode] = []
    for (query, _), group in group_by_query(rollout, samples).items():
        new_group = next(new_groups, None) if query in replaced else None
        episodes += group if new_group is None else new_group
        discarded += [] if new_group is None else group
    return Rollout(episodes, concat_rollouts([rollout, new]).counters), discarded


def count_tokens(episodes: Sequence[MultiAgentEpisode]) -> int:
    """Returns the number of response tokens of chains."""
    return sum(int(rows.mask.sum()) for rows in rows_from_episodes(episodes).values())
