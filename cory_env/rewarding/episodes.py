"""Computes the task rewards of episodes, and feedback, in batches with one call of the function per batch."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from cory_env.rewarding.process import REWARD, role_reward
from cory_env.rewarding.worker import RewardWorker
from cory_env.tasks.rows import QUERY_ARGUMENT
from cory_env.tasks.turns import NO_ANSWER

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


def reward_episodes(
    worker: RewardWorker, episodes: Sequence["ChainEpisode"], first: int = 0
) -> list[list[float | None]]:
    """Returns the task rewards of finished episodes. One call of the function rewards all responses.

    Samples are ordered by episode, then by the chain's order of roles. The columns are those of the queries, `role` and
    `completion_ids`; if a query lacks a column of another query, its value is None. If a query is a conversation, its
    completion is a list of one assistant message.

    Args:
        episodes: Finished episodes; they may belong to different chains.
        first: The first position to reward.

    Returns:
        Per episode, the task reward of each response from `first` on; NaN if its role has none, None if the worker
        skipped the sample or the feedback on it.
    """
    positions = [range(first, len(episode.responses)) for episode in episodes]
    keys = [(index, k) for index, episode in enumerate(episodes) if not episode.failed for k in positions[index]]
    values: dict[tuple[int, int], float | None] = {}
    for function in dict.fromkeys(_reward_function(episodes[index], k) for index, k in keys):
        chosen = [(index, k) for index, k in keys if _reward_function(episodes[index], k) == function]
        if function is None:
            values |= dict.fromkeys(chosen, math.nan)
        else:
            rewards = worker.rewards(*_samples([_response(episodes[index], k) for index, k in chosen]), function)
            values |= dict(zip(chosen, rewards, strict=True))
    return [[values.get((index, k)) for k in positions[index]] for index in range(len(episodes))]


def give_feedback(worker: RewardWorker, episodes: Sequence["ChainEpisode"]) -> None:
    """Computes the missing feedback on the responses so far in one call, and notes it in the episodes."""
    missing = [range(len(episode.feedback), len(episode.responses)) for episode in episodes]
    answers = [
        _response(episode, k)
        for episode, positions in zip(episodes, missing, strict=True)
        for k in positions
        if episode.has_answer(k)
    ]
    feedback = iter(worker.feedback(*_samples(answers)))
    for episode, positions in zip(episodes, missing, strict=True):
        episode.note_feedback([next(feedback) if episode.has_answer(k) else NO_ANSWER for k in positions])


def compute_awaited(worker: RewardWorker, episodes: Sequence["ChainEpisode"]) -> None:
    """Computes the feedback that the next turns of episodes depend on."""
    give_feedback(worker, [episode for episode in episodes if episode.is_waiting])


def _reward_function(episode: "ChainEpisode", position: int) -> str | None:
    """Returns the name of the function that rewards the response at a position; None if it has no reward."""
    role = episode.chain.positions[position].role
    if not role.has_reward:
        return None
    return REWARD if role.own_reward is None else role_reward(role.name)


def _response(episode: "ChainEpisode", position: int) -> RewardedResponse:
    """Returns a response without its thought."""
    agent, text = episode.chain.agents[position], episode.completions[position]
    return RewardedResponse(episode.query, agent, text, episode.shown_tokens(position))


def reward_responses(
    worker: RewardWorker, responses: Sequence[RewardedResponse], function: str = REWARD
) -> list[float | None]:
    """Returns the reward of each response, from one call of the function; see `reward_episodes`.

    Args:
        function: The name of the reward: the task's, or a role's (`role_reward`).
    """
    return worker.rewards(*_samples(responses), function)


def _samples(responses: Sequence[RewardedResponse]) -> tuple[list[object], list[object], dict[str, list[object]]]:
    """Returns responses as prompts, completions and columns."""
    names = dict.fromkeys(name for response in responses for name in response.query.columns)
    columns: dict[str, list[object]] = {
        name: [response.query.columns.get(name) for response in responses] for name in names
    }
    columns["role"] = [response.role for response in responses]
    columns["completion_ids"] = [response.tokens for response in responses]
    prompts: list[object] = [response.query.raw for response in responses]
    columns.setdefault(QUERY_ARGUMENT, prompts)
    return prompts, [response.completion for response in responses], columns
