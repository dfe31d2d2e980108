"""Episodes → padded token tensors, one set of rows per LLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.rllib.env.multi_agent_episode import MultiAgentEpisode

from policies.learning.rows import Rows, make_rows

LOGPROBS = "logprobs"
TASK_REWARD = "task_reward"
ENDED = "ended"
PROMPT_REF = "prompt_ref"
"""Under which `custom_data` of an episode has what was dealt."""


def rows_of(episodes: Sequence[MultiAgentEpisode]) -> dict[str, Rows]:
    """Turns chain episodes into rows, on the CPU, by LLM in sorted order; an LLM without episodes gets none.

    Rows are grouped by the LLM that *generated* them (`SingleAgentEpisode.module_id`), never by the current mapping,
    which a role exchange may have changed. Every agent's episode holds one step: its prompt, its response, its reward.
    A response of the pioneer from which several chains go on is one row. Responses are compared with others in their
    role: to the same query; or, where chains fork, the later ones to the same response of the pioneer.
    """
    prompt_refs = [episode.custom_data[PROMPT_REF] for episode in episodes]
    first: dict[tuple[int, int], int] = {}  # chain with a response of the pioneer
    forks = [
        first.setdefault((prompt_ref.query, prompt_ref.sample), chain) for chain, prompt_ref in enumerate(prompt_refs)
    ]
    queries = [prompt_ref.query for prompt_ref in prompt_refs]
    later = queries if len(first) == len(episodes) else forks
    collected: dict[str, list[tuple[Any, ...]]] = {}
    for chain, episode in enumerate(episodes):
        agents = episode.agent_episodes.values()
        rewards = [float(agent.extra_model_outputs[TASK_REWARD][0]) for agent in agents]
        for position, agent in enumerate(agents):
            if position == 0 and forks[chain] != chain:
                continue
            observation, action = agent.observations[0], agent.actions[0]
            compared = queries[chain] if position == 0 else later[chain]
            collected.setdefault(agent.module_id, []).append(
                (
                    observation["tokens"][: int(observation["length"])],
                    action["tokens"][: int(action["length"])],
                    agent.extra_model_outputs[LOGPROBS][0],
                    agent.extra_model_outputs[TASK_REWARD][0],
                    agent.extra_model_outputs[ENDED][0],
                    compared * len(agents) + position,
                    chain,
                    forks[chain],
                    position,
                    [rewards[at] if at < position else 0.0 for at in range(len(rewards) - 1)],
                )
            )
    return {policy_id: make_rows(*zip(*collected[policy_id], strict=True)) for policy_id in sorted(collected)}
