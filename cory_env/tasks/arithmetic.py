"""Arithmetic: sums and differences of two numbers, so easy that a small model learns them on a CPU.

    12 + 57 = 69
    80 - 34 = 46
    61 + 24 =

Nothing is downloaded: the queries are drawn, the same ones at each call. The pioneer sees four examples and the query,
the observer the pioneer's answer on a line before it. With `chat` the same text is the user's message. The reward is 1
if the last number of the response's first line is the right one, else 0.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cory_env.rewards.answer import first_line
from cory_env.tasks.answers import ANSWER, AnswerTask
from cory_env.tasks.rows import HOLD_OUT_EVERY, Source, read_queries, read_splits
from cory_env.tasks.task import Query, Task
from cory_env.tasks.template import placeholders

Operations = Literal["sums", "differences", "both"]

DIGITS = 2
MOST_DIGITS = 9
PAIRS = 4000
EXAMPLES = 4
REWARD = "cory_env.rewards.answer:first_line_is_right"

PROMPT = "{query} ="
OBSERVER_PROMPT = "Reference: {query} = {reference}\n{query} ="
REFERENCE_SEPARATOR = "\nReference: {query} = "  # three agents or more, ours


@dataclass(frozen=True, kw_only=True)
class Arithmetic(AnswerTask):
    """The task. Of a response its first line is the answer, so that is what later agents see."""

    def observer_prompt(self, query: Query, responses: Sequence[str]) -> str:
        """Returns the later agents' prompt, with the first line of each response."""
        return super().observer_prompt(query, [first_line(response) for response in responses])


def make(
    *,
    data: Source | None = None,
    eval_data: Source | None = None,
    reward: str | None = None,
    prompt: str | None = None,
    observer_prompt: str | None = None,
    digits: int | None = None,
    operations: Operations | None = None,
) -> Task:
    """Builds the task; see `cory_env.tasks.make_task` for the settings and errors.

    Queries of one's own have the columns `query`, such as `12 + 34`, and `answer`. With a reward of one's own there are
    no gold answers, and with an `observer_prompt` of one's own several earlier responses stand on a line each.
    """
    if data is not None and (digits is not None or operations is not None):
        raise ValueError("digits and operations say which queries are drawn, but data brings its own. Leave one out.")
    examples, train, test = draw_queries(DIGITS if digits is None else digits, operations or "both")
    shown = "".join(f"{query.text} = {query.columns[ANSWER]}\n" for query in examples)
    separator = "\n" if observer_prompt else REFERENCE_SEPARATOR
    prompt, observer_prompt = prompt or shown + PROMPT, observer_prompt or shown + OBSERVER_PROMPT
    required = placeholders(prompt) | placeholders(observer_prompt) - {"reference"}
    required |= set() if reward else {ANSWER}
    if data is not None:
        train, test = read_splits(data, eval_data, required)
    elif eval_data is not None:
        test = read_queries(eval_data, required)
    return Arithmetic(
        name="arithmetic",
        train=train,
        test=test,
        reward=reward or REWARD,
        prompt_template=prompt,
        observer_template=observer_prompt,
        reference_separator=separator,
        solved_at=None if reward else 1.0,
    )


def draw_queries(digits: int, operations: Operations) -> tuple[list[Query], list[Query], list[Query]]:
    """Returns the examples of the prompt, the training queries and the held-out ones.

    Of 4,000 different pairs of numbers (with one digit, of all 55 that there are) the first four make the examples, and
    of the others every tenth is held out: 3,597 pairs to train on and 399 held out (46 and 5). So no pair is in two of
    the three, in either order. A pair is a query with one operation and two with both; differences are not negative.

    Args:
        digits: How many each number has, 1 to 9.
        operations: `sums`, `differences` or `both`.

    Raises:
        ValueError: A setting is out of range.
    """
    if not 1 <= digits <= MOST_DIGITS:
        raise ValueError(f"digits is {digits}, but the numbers of arithmetic have 1 to {MOST_DIGITS} digits.")
    if operations not in ("sums", "differences", "both"):
        raise ValueError(f"operations is {operations!r}, but must be 'sums', 'differences' or 'both'.")
    draw = random.Random(f"arithmetic {digits}")
    low, high = 0 if digits == 1 else 10 ** (digits - 1), 10**digits
    count = (high - low) * (high - low + 1) // 2
    pairs: list[tuple[int, int]] = []
    for index in draw.sample(range(count), min(PAIRS, count)):
        larger = (math.isqrt(8 * index + 1) - 1) // 2  # pairs are numbered (0, 0), (1, 0), (1, 1), (2, 0), …
        smaller = index - larger * (larger + 1) // 2
        first, second = draw.sample((low + larger, low + smaller), 2)
        pairs.append((first, second))
    signs = {"sums": "+", "differences": "-", "both": "+-"}[operations]
    examples = [_query(i, *pair, signs[i % len(signs)]) for i, pair in enumerate(pairs[:EXAMPLES])]
    train: list[Query] = []
    test: list[Query] = []
    for number, pair in enumerate(pairs[EXAMPLES:], start=1):
        split = train if number % HOLD_OUT_EVERY else test
        split += [_query(len(split) + i, *pair, sign) for i, sign in enumerate(signs)]
    return examples, train, test


def _query(number: int, first: int, second: int, sign: str) -> Query:
    if sign == "-":
        first, second = max(first, second), min(first, second)
    answer = first + second if sign == "+" else first - second
    return Query(number, f"{first} {sign} {second}", {ANSWER: str(answer)})
