"""Example answers to queries: their rewards without a model, and whether a reward distinguishes them."""

from collections.abc import Iterator, Mapping, Sequence

from cory_env.chain import Chain
from cory_env.message import MESSAGES_RULE
from cory_env.rewarding.episodes import RewardedResponse, reward_responses
from cory_env.rewarding.process import REWARD, Reward, role_reward
from cory_env.rewarding.worker import RewardError, RewardWorker
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
    chain: Chain,
    worker: RewardWorker,
    answers: Sequence[Answer],
    position: int | None = None,
    *,
    as_text: bool = False,
) -> list[float | None]:
    """Returns the rewards of answers to queries.

    Args:
        position: The position that responds; None: the pioneer, with the task's reward.
        as_text: Answer conversations with text, too, rather than with a list of one message.
    """
    encoder = chain.encoders[position or 0]
    tokens = encoder.control.encode_text([text for _, text in answers])
    role = chain.positions[position].role if position is not None else None
    return reward_responses(
        worker,
        [
            RewardedResponse(query, chain.roles[position or 0], text, ids or list(encoder.stop_token_ids[:1]), as_text)
            for (query, text), ids in zip(answers, tokens, strict=True)
        ],
        REWARD if role is None or role.own_reward is None else role_reward(role.name),
    )


def find_constant_rewards(
    chain: Chain, worker: RewardWorker, answers: Sequence[Answer], rewards: Mapping[int, Sequence[float | None]]
) -> list[str]:
    """Returns warnings about rewards that do not distinguish the answers to a query.

    Completions of conversations are lists of messages. If a function, also one of several in a sum, gives equal values
    to all these lists but not to the texts in them, it expects texts.
    """
    constant, text_readers = [], dict[str, None]()
    for position, values in rewards.items():
        if is_constant := _is_constant(answers, values):
            constant.append(position)
        parts = _parts(values)
        fixed = [name for name in parts if _is_constant(answers, parts[name])]
        if (fixed or is_constant) and any(query.history is not None for query, _ in answers):
            try:
                as_text = reward_answers(chain, worker, answers, position, as_text=True)
            except RewardError:  # it reads messages
                continue
            varied = [name for name in fixed if not _is_constant(answers, _parts(as_text)[name])]
            text_readers |= dict.fromkeys(varied)
    warnings = []
    if constant:
        values = [value for position in constant for value in rewards[position] if value is not None]
        roles = "" if len(constant) == len(rewards) else f" of the {', '.join(chain.roles[k] for k in constant)}"
        same = f"{values[0]:g}" if len({*values}) == 1 else "the same for a query"
        warnings.append(
            f"The reward{roles} is {same}, whatever the answer: {len(answers)} examples, among them an empty answer, "
            "the query, and the texts of its columns. If all responses get the same reward, nothing is learned."
        )
    if text_readers:
        names = f" {', '.join(text_readers)}" * any(text_readers)
        warnings.append(
            f"The reward{names} is the same for all lists of messages, but not for the texts in them. {MESSAGES_RULE}"
        )
    elif constant and any(query.history is not None for query, _ in answers):
        warnings.append(MESSAGES_RULE)
    return warnings


def _parts(values: Sequence[float | None]) -> dict[str, list[float | None]]:
    """Returns the values of each function of a weighted sum by its name; of a single function by ""."""
    names = [*values[0].parts] if isinstance(values[0], Reward) else []
    if not names:
        return {"": [*values]}
    return {name: [value.parts[name] for value in values if isinstance(value, Reward)] for name in names}


def _is_constant(answers: Sequence[Answer], values: Sequence[float | None]) -> bool:
    """Whether all answers to the same query have equal values."""
    first: dict[int, float | None] = {}
    return all(value == first.setdefault(query.id, value) for (query, _), value in zip(answers, values, strict=True))
