"""Computes the task rewards of episodes in batches, with one call of the reward function per batch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from cory_env.rewarding.worker import RewardWorker

if TYPE_CHECKING:
    from cory_env.episode import ChainEpisode
    from cory_env.message import Message
    from cory_env.tasks.task import Query


class RewardedResponse(NamedTuple):
    """The input of the reward function for one response.

    Attributes:
        query: The query.
        role: The role that responded.
        text: The decoded response.
        tokens: The response's token ids.
    """

    query: "Query"
    role: str
    text: str
    tokens: Sequence[int]

    @property
    def completion(self) -> "str | list[Message]":
        """The text, or a list of one assistant message if the query is a conversation."""
        return self.text if self.query.history is None else [{"role": "assistant", "content": self.text}]


def reward_episodes(worker: RewardWorker, episodes: Sequence["ChainEpisode"]) -> list[list[float | None]]:
    """Returns the task rewards of finished episodes. One call of the function rewards all responses without a reward.

    Samples are ordered by episode, then by the chain's order of roles. The columns are those of the queries, `role` and
    `completion_ids`; if a query lacks a column of another query, its value is None. If a query is a conversation, its
    completion is a list of one assistant message.

    Args:
        worker: The reward function.
        episodes: Episodes in which all agents have responded; they may belong to different chains.

    Returns:
        Per episode, the task reward of each role; None if the worker skipped the sample.

    Raises:
        RewardError: The function failed.
    """
    rewards = _missing_rewards(worker, episodes)
    return [[*episode.task_rewards, *new_rewards] for episode, new_rewards in zip(episodes, rewards, strict=True)]


def reward_so_far(worker: RewardWorker, episodes: Sequence["ChainEpisode"]) -> None:
    """Computes the missing task rewards of the responses so far in one call, and notes them in the episodes.

    Each response is rewarded only once, because `reward_episodes` returns noted rewards with the others. A response
    whose reward was skipped counts as the worst when an agent sees the best one (`observed` is `best`).

    Raises:
        RewardError: The function failed.
    """
    for episode, rewards in zip(episodes, _missing_rewards(worker, episodes), strict=True):
        episode.note_rewards(rewards)


def _missing_rewards(worker: RewardWorker, episodes: Sequence["ChainEpisode"]) -> list[list[float | None]]:
    """Returns, per episode, the task rewards of the responses that have none noted."""
    missing = [range(len(episode.task_rewards), len(episode.responses)) for episode in episodes]
    responses = [
        RewardedResponse(
            episode.query, episode.chain.roles[position], episode.completions[position], episode.responses[position]
        )
        for episode, positions in zip(episodes, missing, strict=True)
        for position in positions
    ]
    values = iter(reward_responses(worker, responses))
    return [[next(values) for _ in positions] for positions in missing]


def reward_responses(worker: RewardWorker, responses: Sequence[RewardedResponse]) -> list[float | None]:
    """Returns the task reward of each response, from one call of the function; see `reward_episodes`.

    Raises:
        RewardError: The function failed.
    """
    names = dict.fromkeys(name for response in responses for name in response.query.columns)
    columns: dict[str, list[object]] = {
        name: [response.query.columns.get(name) for response in responses] for name in names
    }
    columns["role"] = [response.role for response in responses]
    columns["completion_ids"] = [response.tokens for response in responses]
    prompts = [response.query.raw for response in responses]
    return worker.rewards(prompts, [response.completion for response in responses], columns)
