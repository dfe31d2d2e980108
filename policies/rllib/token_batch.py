"""Episodes → padded token tensors, one set of rows per policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.rllib.env.multi_agent_episode import MultiAgentEpisode

from policies.learning.rows import MAX_TURNS, Rows, make_rows

LOGPROBS = "logprobs"
TASK_REWARD = "task_reward"
TASK_REWARD_PARTS = "task_reward_parts"
"""The value of each of several reward functions; empty without a reward, and with a single function."""
ENDED = "ended"
THOUGHT_CUT = "thought_cut"
"""Whether the response ends within its thought; None without `thinking`."""
TURN = "turn"
"""How often the agent responded before in its episode; None in chains."""
PARTNER_REWARD = "partner_reward"
"""What the other agents got until this agent's next turn; None in chains."""
STAGE = "stage"
"""The first position of the agents that respond without seeing each other (`Position.stage`)."""
PROMPT_REF = "prompt_ref"
"""Key of an episode's `PromptRef` in its `custom_data`."""


def rows_from_episodes(episodes: Sequence[MultiAgentEpisode]) -> dict[str, Rows]:
    """Turns episodes into rows, one per response.

    Rows belong to the policy that *generated* them (`SingleAgentEpisode.module_id`), not to the policy that has the
    role now, which a role exchange may have changed. Every step of an agent's episode is a prompt, a response and a
    reward; in a chain there is one. A response is grouped with the responses of the same role to the same query, those
    of several drafts together; in an environment also of the same turn. A role without a reward has the task reward
    NaN.

    Returns:
        Rows by policy id, in sorted order, on the CPU; policies without responses are absent.
    """
    rows: dict[str, list[tuple[Any, ...]]] = {}
    for chain, episode in enumerate(episodes):
        positions = {agent: k for k, agent in enumerate(episode.agent_to_module_mapping_fn.agents)}
        query = episode.custom_data[PROMPT_REF].query
        for name, agent in episode.agent_episodes.items():  # in the chain's order; a stopped one has fewer than others
            for step in range(len(agent)):
                observation, action = agent.observations[step], agent.actions[step]
                outputs = {key: values[step] for key, values in agent.extra_model_outputs.items()}
                group = query * len(positions) + int(outputs[STAGE])
                rows.setdefault(agent.module_id, []).append(
                    (
                        observation["tokens"][: int(observation["length"])],
                        action["tokens"][: int(action["length"])],
                        outputs[LOGPROBS],
                        outputs[TASK_REWARD],
                        outputs[ENDED],
                        group if outputs[TURN] is None else group * MAX_TURNS + int(outputs[TURN]),
                        chain,
                        positions[name],
                        outputs[TASK_REWARD_PARTS],
                        outputs[THOUGHT_CUT],
                        outputs[TURN],
                        outputs[PARTNER_REWARD],
                    )
                )
    return {policy_id: make_rows(*zip(*rows[policy_id], strict=True)) for policy_id in sorted(rows)}
