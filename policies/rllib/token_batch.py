"""Episodes → padded token tensors, one set of rows per LLM, and how learners get them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode

from policies.learning.rows import Rows, make_rows

LOGPROBS = "logprobs"
TASK_REWARD = "task_reward"
ENDED = "ended"
QUERY = "query"
SAMPLE = "sample"


class SharedRows(TrainingData):
    """Rows that every learner gets whole: learners share the work on a batch, not the batch.

    RLlib's own sharding cuts episodes apart where their steps do not divide by the learners, and so loses responses.
    """

    batch: Any = None
    """The rows, by LLM."""
    batch_refs: Any = None

    def shard(self, num_shards: int, **kwargs: Any) -> list[tuple[TrainingData, dict[str, Any]]]:
        """One reference to all rows per learner."""
        whole = ray.put(self.batch)
        return [(SharedRows(batch_refs=[whole]), {}) for _ in range(num_shards)]

    def solve_refs(self) -> None:
        """Fetches the rows."""
        if self.batch_refs is not None:
            (self.batch,) = ray.get(self.batch_refs)
            self.batch_refs = None


def rows_of(episodes: Sequence[MultiAgentEpisode]) -> dict[str, Rows]:
    """Turns chain episodes into rows, on the CPU, by LLM in sorted order; an LLM without episodes gets none.

    Rows are grouped by the LLM that *generated* them (`SingleAgentEpisode.module_id`), never by the current mapping,
    which a role exchange may have changed. Every agent's episode holds one step: its prompt, its response, its reward.
    A response of the pioneer from which several chains go on is one row. Responses are compared with others in their
    role: to the same query; or, where chains fork, the later ones to the same response of the pioneer.
    """
    played = [next(iter(episode.agent_episodes.values())).extra_model_outputs for episode in episodes]
    queries = [int(pioneer[QUERY][0]) for pioneer in played]
    first: dict[tuple[int, int], int] = {}  # chain with a response of the pioneer
    forks = [
        first.setdefault((query, int(pioneer[SAMPLE][0])), chain)
        for chain, (query, pioneer) in enumerate(zip(queries, played, strict=True))
    ]
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
    return {module_id: make_rows(*zip(*collected[module_id], strict=True)) for module_id in sorted(collected)}
