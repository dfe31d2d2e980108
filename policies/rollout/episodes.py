"""A finished chain as others take it: as an RLlib episode, and as text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode

from cory_env.chain import Chain
from cory_env.episode import ChainEpisode
from cory_env.rewarding.process import Reward
from policies.generation.generator import Response
from policies.learning.measures import repetition
from policies.rllib.token_batch import ENDED, LOGPROBS, QUERY, SAMPLE, TASK_REWARD
from policies.rollout.dealing import Deal
from policies.rollout.role_mapping import RoleMapping


def as_rllib_episode(
    deal: Deal,
    episode: ChainEpisode,
    responses: Sequence[Response],
    task_rewards: Sequence[float],
    mapping: RoleMapping,
) -> MultiAgentEpisode:
    """Turns a finished chain into an RLlib episode: one step per role, every reward with the last step.

    Args:
        deal: what was played.
        episode: all roles have answered.
        responses: what was generated, per role.
        task_rewards: r_i per role; agents receive the collective reward.
        mapping: roles at generation time; the episode keeps it.
    """
    chain: Chain = episode.chain
    observation_space, action_space = _spaces(chain)
    out = MultiAgentEpisode(
        observation_space=observation_space,
        action_space=action_space,
        agent_to_module_mapping_fn=mapping,
    )
    out.add_env_reset(observations={chain.roles[0]: episode.observation(chain.roles[0])})
    for position, role in enumerate(chain.roles):
        last = position == len(chain.roles) - 1
        tokens = episode.responses[position]
        following = () if last else (chain.roles[position + 1],)
        out.add_env_step(
            observations={other: episode.observation(other) for other in following},
            actions={role: {"tokens": tokens, "length": len(tokens)}},
            rewards=episode.collective_rewards(task_rewards) if last else {},
            terminateds={"__all__": last},
            extra_model_outputs={
                role: {
                    LOGPROBS: responses[position].logprobs[: len(tokens)],
                    TASK_REWARD: float(task_rewards[position]),
                    QUERY: deal.query,
                    SAMPLE: deal.sample,
                    ENDED: episode.ended[position],
                }
            },
        )
    return out


@lru_cache(maxsize=16)
def _spaces(chain: Chain) -> tuple[dict[str, Any], dict[str, Any]]:
    """Observation and action space of every role: one object for all episodes of a chain, so pickled once with them."""
    observation, action = chain.observation_space(), chain.action_space()
    return dict.fromkeys(chain.roles, observation), dict.fromkeys(chain.roles, action)


def reward_parts(roles: Sequence[str], task_rewards: Sequence[Sequence[float]]) -> dict[str, dict[str, list[float]]]:
    """What each of several reward functions gave, by role and by its name; nothing where there is one function."""
    found: dict[str, dict[str, list[float]]] = {}
    for of_chain in task_rewards:
        for role, reward in zip(roles, of_chain, strict=True):
            for name, value in reward.parts.items() if isinstance(reward, Reward) else ():
                found.setdefault(role, {}).setdefault(name, []).append(value)
    return found


def as_text(episode: ChainEpisode, task_rewards: Sequence[float], mapping: RoleMapping) -> dict[str, Any]:
    """A finished chain for people: the query, what each role answered, and what of it would be a sign of collapse."""
    return {
        "query": episode.query.text,
        "responses": [
            {
                "role": role,
                "policy": mapping(role),
                "text": text,
                "task_reward": float(reward),
                **({"rewards": dict(reward.parts)} if isinstance(reward, Reward) else {}),
                "ended": ended,
                "repetition": float(repetition(torch.tensor([tokens]), torch.ones(1, len(tokens)))),
            }
            for role, text, tokens, ended, reward in zip(
                episode.chain.roles,
                episode.completions,
                episode.responses,
                episode.ended,
                task_rewards,
                strict=True,
            )
        ],
    }
