"""Example answers to queries: their rewards without a model, and whether a reward distinguishes them."""

from collections.abc import Iterator, Mapping, Sequence

from cory_env.chain import Chain
from cory_env.message import MESSAGES_RULE
from cory_env.rewarding.episodes import RewardedResponse, reward_responses
from cory_env.rewarding.process import REWARD, Reward, role_reward
from cory_env.rewarding.worker import RewardWorker
from cory_env.tasks import Query, Split, Task

Answer = tuple[Query, str]

VARIED_TEXT = "Yes! The answer is:\n\n1. <answer>\\boxed{42}</answer>\n```python\nprint(42)\n```"
"""An answer with a bit of everything that a reward may look for in any query: words, digits, tags, a list and code."""


def gold_answers(task: Task, split: Split) -> list[Answer]:
    """Returns the queries with a gold answer, and their answers."""
    golds = [(query, task.gold(query)) for query in task.queries(split)]
    return [(query, gold) for query, gold in golds if gold is not None]


def example_answers(task: Task, queries: Sequence[Query]) -> list[Answer]:
    """Returns answers to each query: its gold answer and its text, nothing, what its columns contain, and any text."""
    answers: list[Answer] = []
    for query in queries:
        columns = [text for value in query.columns.values() if (text := " ".join(_texts(value)))]
        texts = [task.gold(query) or "", query.text, "", *columns, " ".join(columns), VARIED_TEXT]
        answers += [(query, text) for text in dict.fromkeys(texts)]
    return answers


def _texts(value: object) -> Iterator[str]:
    """Yields the texts and numbers of a column's value, which may be nested."""
    if isinstance(value, Mapping | list | tuple):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(entry)
    elif value is not None:
        yield str(value)


def reward_answers(
    chain: Chain, worker: RewardWorker, answers: Sequence[Answer], position: int | None = None
) -> list[float | None]:
    """Returns the rewards of answers to queries.

    Args:
        position: The position that responds; None: the pioneer, with the task's reward.
    """
    encoder = chain.encoders[position or 0]
    tokens = encoder.control.encode_text([text for _, text in answers])
    role = chain.positions[position].role if position is not None else None
    return reward_responses(
        worker,
        [
            RewardedResponse(query, chain.agents[position or 0], text, ids or list(encoder.stop_token_ids[:1]))
            for (query, text), ids in zip(answers, tokens, strict=True)
        ],
        REWARD if role is None or role.own_reward is None else role_reward(role.name),
    )


def find_constant_rewards(
    chain: Chain, answers: Sequence[Answer], rewards: Mapping[int, Sequence[float | None]]
) -> list[str]:
    """Returns warnings about rewards that do not distinguish the answers to a query.

    For conversations also about single functions of a sum, because they may expect texts instead of messages.

    Args:
        rewards: The rewards of the answers, by position.
    """
    constant = [position for position, values in rewards.items() if _is_constant(answers, values)]
    has_messages = any(query.history is not None for query, _ in answers)
    if not constant:
        names = _constant_parts(answers, rewards) if has_messages else []
        return [f"The reward {name} is the same for all example answers to a query. {MESSAGES_RULE}" for name in names]
    values = [value for position in constant for value in rewards[position] if value is not None]
    roles = "" if len(constant) == len(rewards) else f" of the {', '.join(chain.agents[k] for k in constant)}"
    same = f"{values[0]:g}" if len({*values}) == 1 else "the same for a query"
    return [
        f"The reward{roles} is {same}, whatever the answer: {len(answers)} examples, among them an empty answer, "
        "the query, and the texts of its columns. If all responses get the same reward, nothing is learned.",
        *([MESSAGES_RULE] if has_messages else []),
    ]


def _constant_parts(answers: Sequence[Answer], rewards: Mapping[int, Sequence[float | None]]) -> list[str]:
    """Returns the functions of weighted sums that distinguish the answers to a query at no position."""
    is_constant: dict[str, bool] = {}
    for values in rewards.values():
        parts = [value.parts if isinstance(value, Reward) else {} for value in values]
        for name in dict.fromkeys(name for part in parts for name in part):
            part_is_constant = _is_constant(answers, [part.get(name) for part in parts])
            is_constant[name] = is_constant.get(name, True) and part_is_constant
    return [name for name, value in is_constant.items() if value]


def _is_constant(answers: Sequence[Answer], values: Sequence[float | None]) -> bool:
    """Whether all answers to the same query have equal values."""
    first: dict[int, float | None] = {}
    return all(value == first.setdefault(query.id, value) for (query, _), value in zip(answers, values, strict=True))
