"""Episodes → padded token tensors, one set of rows per LLM: the learner's connector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode

from policies.learning.rows import Rows, make_rows

LOGPROBS = "logprobs"
TASK_REWARD = "task_reward"
ENDED = "ended"
QUERY = "query"


class SharedEpisodes(TrainingData):
    """Episodes that every learner gets whole: learners share the work on a batch, not the batch.

    RLlib's own sharding cuts episodes apart where their steps do not divide by the learners, and so loses responses.
    """

    def shard(self, num_shards: int, **kwargs: Any) -> list[tuple[TrainingData, dict[str, Any]]]:
        """One reference to all episodes per learner."""
        whole = ray.put(self.episodes)
        return [(TrainingData(episodes_refs=[whole]), {}) for _ in range(num_shards)]


class TokenBatch(ConnectorV2):
    """Turns chain episodes into `{llm: Rows}`, in sorted order of the LLMs.

    Rows are grouped by the LLM that *generated* them (`SingleAgentEpisode.module_id`), never by the current mapping,
    which a role exchange may have changed. Every agent's episode holds one step: its prompt, its response, its reward.
    """

    def __call__(
        self, *, rl_module: Any, batch: dict[str, Any], episodes: Sequence[MultiAgentEpisode], **kwargs: Any
    ) -> dict[str, Rows]:
        """Builds the rows, on the CPU; a module without episodes gets none."""
        collected: dict[str, list[tuple[Any, ...]]] = {}
        for episode in episodes:
            for agent in episode.agent_episodes.values():
                observation, action = agent.observations[0], agent.actions[0]
                collected.setdefault(agent.module_id, []).append(
                    (
                        observation["tokens"][: int(observation["length"])],
                        action["tokens"][: int(action["length"])],
                        agent.extra_model_outputs[LOGPROBS][0],
                        agent.rewards[0],
                        agent.extra_model_outputs[TASK_REWARD][0],
                        agent.extra_model_outputs[ENDED][0],
                        agent.extra_model_outputs[QUERY][0],
                    )
                )
        return {module_id: make_rows(*zip(*collected[module_id], strict=True)) for module_id in sorted(collected)}
