"""Scores the responses of episodes in batches, one call of the reward function each."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from cory_env.rewarding.worker import RewardWorker

if TYPE_CHECKING:
    from cory_env.episode import ChainEpisode
    from cory_env.message import Message
    from cory_env.tasks.task import Query


class RewardedResponse(NamedTuple):
    """A response as the reward function gets it."""

    query: "Query"
    role: str
    text: str
    tokens: Sequence[int]

    @property
    def completion(self) -> "str | list[Message]":
        """The text; a message of the assistant's where the query is a conversation."""
        return self.text if self.query.history is None else [{"role": "assistant", "content": self.text}]


def reward_episodes(worker: RewardWorker, episodes: Sequence["ChainEpisode"]) -> list[list[float | None]]:
    """Returns the task rewards of finished episodes, from one call of the function for the responses without one.

    The samples stand episode by episode, in each the roles in the chain's order. The columns are those of the queries,
    repeated to match, `role` and `completion_ids`; a query that lacks a column of another has None there. Where a query
    is a conversation, so is the completion: a list of one message of the assistant's.

    Args:
        worker: The reward function.
        episodes: Episodes in which all agents have answered; they may belong to different chains.

    Returns:
        Per episode, the task reward of each role; None where the worker skipped a sample.

    Raises:
        RewardError: The function failed.
    """
    rewards = _reward(worker, episodes)
    return [[*episode.task_rewards, *others] for episode, others in zip(episodes, rewards, strict=True)]


def reward_so_far(worker: RewardWorker, episodes: Sequence["ChainEpisode"]) -> None:
    """Asks, in one call, for the rewards of the responses so far that have none, and notes them in the episodes.

    So each response is rewarded once: `reward_episodes` returns these rewards with the others. A response whose reward
    was skipped counts as the worst of those that an agent may see (`observed` is `best`).

    Raises:
        RewardError: The function failed.
    """
    for episode, rewards in zip(episodes, _reward(worker, episodes), strict=True):
        episode.note_rewards(rewards)


def _reward(worker: RewardWorker, episodes: Sequence["ChainEpisode"]) -> list[list[float | None]]:
    """Returns, per episode, the task rewards of the responses that have none noted."""
    waiting = [range(len(episode.task_rewards), len(episode.responses)) for episode in episodes]
    responses = [
        RewardedResponse(
            episode.query, episode.chain.roles[position], episode.completions[position], episode.responses[position]
        )
        for episode, of in zip(episodes, waiting, strict=True)
        for position in of
    ]
    values = iter(reward_responses(worker, responses))
    return [[next(values) for _ in of] for of in waiting]


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
