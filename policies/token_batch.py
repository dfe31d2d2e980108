"""Episodes → padded token tensors, one set of rows per LLM: the learner's connector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

import numpy as np
import ray
import torch
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from torch import Tensor

from policies.language_model import left_padded

LOGPROBS = "logprobs"
TASK_REWARD = "task_reward"
ENDED = "ended"
QUERY = "query"


class Rows(TypedDict):
    """Rows of one LLM. `B` responses, `P` prompt tokens (padded on the left), `R` response tokens (on the right)."""

    prompts: Tensor
    """int64 `[B, P]`."""
    prompt_mask: Tensor
    """int64 `[B, P]`, 0 on padding."""
    responses: Tensor
    """int64 `[B, R]`."""
    mask: Tensor
    """fp32 `[B, R]`, 1 on response tokens."""
    sampler_logprobs: Tensor
    """fp32 `[B, R]`, as the generation backend reported them."""
    rewards: Tensor
    """fp32 `[B]`, what the agent trains on, before score scaling."""
    task_rewards: Tensor
    """fp32 `[B]`, the response's own raw reward."""
    ended: Tensor
    """fp32 `[B]`, 1 where the response ends with the end-of-sequence token, 0 where its length was cut."""
    queries: Tensor
    """int64 `[B]`, the query's index in its split."""


def make_rows(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    rewards: Sequence[float],
    task_rewards: Sequence[float],
    ended: Sequence[bool],
    queries: Sequence[int] | None = None,
) -> Rows:
    """Pads ragged lists into tensors, prompts on the left and responses on the right; default: no query comes twice."""
    prompt_tokens, prompt_mask = left_padded(prompts)
    width = max(len(response) for response in responses)
    tokens = np.zeros((len(responses), width), dtype=np.int64)
    mask = np.zeros(tokens.shape, dtype=np.float32)
    sampled = np.zeros(tokens.shape, dtype=np.float32)
    for row, (response, logprob) in enumerate(zip(responses, logprobs, strict=True)):
        tokens[row, : len(response)] = response
        sampled[row, : len(response)] = logprob
        mask[row, : len(response)] = 1.0
    return Rows(
        prompts=prompt_tokens,
        prompt_mask=prompt_mask,
        responses=torch.from_numpy(tokens),
        mask=torch.from_numpy(mask),
        sampler_logprobs=torch.from_numpy(sampled),
        rewards=torch.as_tensor(rewards, dtype=torch.float32),
        task_rewards=torch.as_tensor(task_rewards, dtype=torch.float32),
        ended=torch.as_tensor(ended, dtype=torch.float32),
        queries=torch.as_tensor(range(len(responses)) if queries is None else queries, dtype=torch.int64),
    )


def take(rows: dict[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    """The chosen rows of every column."""
    return {name: column[index] for name, column in rows.items()}


def by_length(rows: dict[str, Tensor]) -> Tensor:
    """The places of the rows, shortest prompts first, of equals the shortest responses; int64 `[B]`."""
    prompt_lengths, response_lengths = rows["prompt_mask"].sum(1), rows["mask"].sum(1)
    order = np.lexsort((response_lengths.cpu().numpy(), prompt_lengths.cpu().numpy()))
    return torch.from_numpy(order).to(prompt_lengths.device)


def micro_batches(rows: dict[str, Tensor], size: int) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Splits rows into micro-batches of similar length, each trimmed to its longest prompt and response.

    Args:
        rows: columns of `Rows` and any other `[B]` or `[B, R]` columns.
        size: most rows per micro-batch.

    Yields:
        `(index, columns)`: the rows' places in `rows`, and their trimmed columns.
    """
    prompt_lengths, response_lengths = rows["prompt_mask"].sum(1), rows["mask"].sum(1).long()
    for index in by_length(rows).split(size):
        prompt, response = int(prompt_lengths[index].max()), int(response_lengths[index].max())
        yield (
            index,
            {
                name: column[index, -prompt:]
                if name.startswith("prompt")
                else column[index, :response]
                if column.dim() > 1
                else column[index]
                for name, column in rows.items()
            },
        )


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
