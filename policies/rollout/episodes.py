"""Finished chains: as RLlib episodes, which carry the chain's prompt reference and its text, and what was counted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode

from cory_env.chain import Chain
from cory_env.episode import ChainEpisode
from cory_env.rewarding.process import Reward
from policies.generation.generator import Response
from policies.learning.metrics import repetition
from policies.rllib.token_batch import ENDED, LOGPROBS, PROMPT_REF, TASK_REWARD
from policies.rollout.prompt_sampling import PromptRef
from policies.rollout.role_mapping import RoleMapping

TEXT = "text"
"""Under which `custom_data` of an episode has `as_text`."""


class Rollout(NamedTuple):
    """Chains that were played."""

    episodes: list[MultiAgentEpisode]
    """One per chain whose reward could be computed, in the order dealt."""
    counters: dict[str, float]
    """`version` (of the weights that generated; the oldest), `tokens` (that were generated), `truncated_prompts` (whose
    reference was cut), `dropped_chains` (whose reward failed, with `on_reward_error: skip`), `rollout_seconds` (without
    rewards), `reward_seconds`."""

    @property
    def prompt_refs(self) -> list[PromptRef]:
        """What was dealt, per episode."""
        return [episode.custom_data[PROMPT_REF] for episode in self.episodes]

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The episodes as text; see `as_text`."""
        return [episode.custom_data[TEXT] for episode in self.episodes]

    def without_chains(self) -> Rollout:
        """This rollout with all its chains dropped."""
        dropped = self.counters["dropped_chains"] + len(self.episodes)
        return Rollout([], {**self.counters, "dropped_chains": dropped})


def join(rollouts: Sequence[Rollout], *, parallel: bool = False) -> Rollout:
    """Puts rollouts together in their order; their seconds count side by side if they ran in parallel."""
    counters: dict[str, float] = {}
    for name in rollouts[0].counters:
        values = [rollout.counters[name] for rollout in rollouts]
        longest = max(values) if parallel and name.endswith("_seconds") else sum(values)
        counters[name] = min(values) if name == "version" else longest
    return Rollout([episode for rollout in rollouts for episode in rollout.episodes], counters)


def as_rllib_episode(
    prompt_ref: PromptRef,
    episode: ChainEpisode,
    responses: Sequence[Response],
    task_rewards: Sequence[float],
    mapping: RoleMapping,
) -> MultiAgentEpisode:
    """Turns a finished chain into an RLlib episode: one step per role, every reward with the last step.

    Args:
        prompt_ref: what was played.
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
    out.custom_data.update({PROMPT_REF: prompt_ref, TEXT: as_text(episode, task_rewards, mapping)})
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
