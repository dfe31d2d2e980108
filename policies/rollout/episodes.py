"""Finished chains as RLlib episodes, which also carry the chain's prompt reference and text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode

from cory_env.episode import Episode
from cory_env.rewarding.process import Reward
from cory_env.text_envs.episode import EnvEpisode
from policies.generation.generator import Response
from policies.learning.metrics import repetition
from policies.rllib.token_batch import (
    ENDED,
    LOGPROBS,
    PARTNER_REWARD,
    PROMPT_REF,
    STAGE,
    TASK_REWARD,
    TASK_REWARD_PARTS,
    THOUGHT_CUT,
    TURN,
)
from policies.rollout.prompt_sampling import PromptRef
from policies.rollout.role_mapping import RoleMapping

CHAIN_TEXT = "text"
"""Key of an episode's `custom_data` for the chain as text; see `to_text`."""


class Rollout(NamedTuple):
    """Generated chains with their rewards.

    Attributes:
        episodes: One per chain whose reward could be computed, in the order of the queries.
        counters: `version` of the weights that generated (the oldest one), number of generated `tokens`, of
            `truncated_prompts` (with a shortened reference), of `dropped_chains` (the reward failed, with
            `on_reward_error: skip`), `rollout_seconds` without rewards, `reward_seconds`.
    """

    episodes: list[MultiAgentEpisode]
    counters: dict[str, float]

    @property
    def prompt_refs(self) -> list[PromptRef]:
        """The prompt reference of each episode."""
        return [episode.custom_data[PROMPT_REF] for episode in self.episodes]

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The episodes as text; see `to_text`."""
        return [episode.custom_data[CHAIN_TEXT] for episode in self.episodes]

    def without_chains(self) -> Rollout:
        """Returns this rollout's counters without episodes, all chains counted as dropped."""
        dropped = self.counters["dropped_chains"] + len(self.episodes)
        return Rollout([], {**self.counters, "dropped_chains": dropped})


def concat_rollouts(rollouts: Sequence[Rollout], *, parallel: bool = False) -> Rollout:
    """Concatenates rollouts.

    Args:
        parallel: whether they ran at the same time, so that the longest time counts instead of the sum.
    """
    counters: dict[str, float] = {}
    for name in rollouts[0].counters:
        values = [rollout.counters[name] for rollout in rollouts]
        if name == "version":
            counters[name] = min(values)
        else:
            counters[name] = max(values) if parallel and name.endswith("_seconds") else sum(values)
    return Rollout([episode for rollout in rollouts for episode in rollout.episodes], counters)


def to_rllib_episode(
    prompt_ref: PromptRef,
    episode: Episode,
    responses: Sequence[Response],
    task_rewards: Sequence[float],
    mapping: RoleMapping,
) -> MultiAgentEpisode:
    """Converts a finished episode to RLlib's: one step per response, all rewards at the last step.

    Agents without a response, such as those that a stopped chain did not ask, have no agent episode.

    Args:
        task_rewards: r_i, by turn. Agents receive the collective reward.
        mapping: the role mapping used for generation; the episode keeps it.
    """
    chain, agents = episode.chain, episode.agents
    partner_rewards = [partner for _, partner in episode.turn_rewards()] if isinstance(episode, EnvEpisode) else None
    rllib_episode = MultiAgentEpisode(agent_to_module_mapping_fn=mapping)
    rllib_episode.custom_data.update({PROMPT_REF: prompt_ref, CHAIN_TEXT: to_text(episode, task_rewards, mapping)})
    rllib_episode.add_env_reset(observations={agents[0]: episode.prompt_array(0)})
    for turn, agent in enumerate(agents):
        last = turn == len(agents) - 1
        tokens = episode.responses[turn]
        rllib_episode.add_env_step(
            observations={} if last else {agents[turn + 1]: episode.prompt_array(turn + 1)},
            actions={agent: {"tokens": tokens, "length": len(tokens)}},
            rewards=episode.step_rewards(turn, task_rewards),
            terminateds={"__all__": last},
            extra_model_outputs={
                agent: {
                    LOGPROBS: responses[turn].logprobs[: len(tokens)],
                    TASK_REWARD: float(task_rewards[turn]),
                    TASK_REWARD_PARTS: np.array([*getattr(task_rewards[turn], "parts", {}).values()], np.float64),
                    ENDED: episode.ended[turn],
                    STAGE: chain.positions[episode.position(turn)].stage,
                    THOUGHT_CUT: None if chain.thinking is None else episode.answer_starts[turn] is None,
                    TURN: None if partner_rewards is None else agents[:turn].count(agent),
                    PARTNER_REWARD: None if partner_rewards is None else partner_rewards[turn],
                }
            },
        )
    return rllib_episode


def to_text(episode: Episode, task_rewards: Sequence[float], mapping: RoleMapping) -> dict[str, Any]:
    """Returns a finished episode as text: the query, and each response with its reward and signs of collapse.

    A response with a thought before its text has it as `reasoning`. A response on which there is feedback has it as
    `feedback`: a text, or None if nothing is to be corrected.
    """
    return {
        "query": episode.query.text,
        "responses": [
            {
                "role": agent,
                "policy": mapping(agent),
                **episode.observation_entry(turn),
                "text": text,
                **episode.thought_entry(turn),
                "task_reward": float(reward),
                **({"rewards": dict(reward.parts)} if isinstance(reward, Reward) else {}),
                **episode.feedback_entry(turn),
                "ended": ended,
                "repetition": float(repetition(torch.tensor([tokens]), torch.ones(1, len(tokens)))),
            }
            for turn, (agent, text, tokens, ended, reward) in enumerate(
                zip(episode.agents, episode.completions, episode.responses, episode.ended, task_rewards, strict=True)
            )
        ],
    }
