"""Episodes → padded token tensors, one set of rows per policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.rllib.env.multi_agent_episode import MultiAgentEpisode

from policies.learning.rows import Rows, make_rows

LOGPROBS = "logprobs"
TASK_REWARD = "task_reward"
TASK_REWARD_PARTS = "task_reward_parts"
"""The value of each of several reward functions; empty without a reward, and with a single function."""
ENDED = "ended"
THOUGHT_CUT = "thought_cut"
"""Whether the response ends within its thought; None without `thinking`."""
STAGE = "stage"
"""The first position of the agents that respond without seeing each other (`Position.stage`)."""
PROMPT_REF = "prompt_ref"
"""Key of an episode's `PromptRef` in its `custom_data`."""


def rows_from_episodes(episodes: Sequence[MultiAgentEpisode]) -> dict[str, Rows]:
    """Turns chain episodes into rows.

    Rows belong to the policy that *generated* them (`SingleAgentEpisode.module_id`), not to the policy that has the
    role now, which a role exchange may have changed. Every agent's episode has one step: prompt, response and reward. A
    response is grouped with the responses of the same role to the same query, those of several drafts together. A role
    without a reward has the task reward NaN.

    Returns:
        Rows by policy id, in sorted order, on the CPU; policies without responses are absent.
    """
    rows: dict[str, list[tuple[Any, ...]]] = {}
    for chain, episode in enumerate(episodes):
        agents = episode.agent_episodes.values()  # in the chain's order; a stopped chain has fewer than others
        num_positions = len(episode.agent_to_module_mapping_fn.agents)
        query = episode.custom_data[PROMPT_REF].query
        for position, agent in enumerate(agents):
            observation, action = agent.observations[0], agent.actions[0]
            stage = int(agent.extra_model_outputs[STAGE][0])
            rows.setdefault(agent.module_id, []).append(
                (
                    observation["tokens"][: int(observation["length"])],
                    action["tokens"][: int(action["length"])],
                    agent.extra_model_outputs[LOGPROBS][0],
                    agent.extra_model_outputs[TASK_REWARD][0],
                    agent.extra_model_outputs[ENDED][0],
                    query * num_positions + stage,
                    chain,
                    position,
                    agent.extra_model_outputs[TASK_REWARD_PARTS][0],
                    agent.extra_model_outputs[THOUGHT_CUT][0],
                )
            )
    return {policy_id: make_rows(*zip(*rows[policy_id], strict=True)) for policy_id in sorted(rows)}
