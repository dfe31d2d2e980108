"""Arithmetic: sums and differences of two numbers, easy enough for a small model to learn on a CPU.

    12 + 57 = 69
    80 - 34 = 46
    61 + 24 =

The queries are generated with a fixed seed; nothing is downloaded. The pioneer's prompt has four examples and the
query; the observer's also has the pioneer's response on a line before the query. With `chat`, the same text is the user
message. The reward is 1 if the last number of the response's first line is right, else 0.

`task: arithmetic?digits=1&operations=sums` has other numbers, and only `sums` or `differences`.
"""

import math
import random

from cory_env.rewards.answer import first_line
from cory_env.tasks.definition import DrawnQueries, TaskDefinition
from cory_env.tasks.numbers import ANSWER, NUMBER_FORMAT, NumberTask
from cory_env.tasks.rows import HOLD_OUT_EVERY
from cory_env.tasks.task import Query

MAX_DIGITS = 9
NUM_PAIRS = 4000
NUM_EXAMPLES = 4


class Arithmetic(NumberTask):
    """The task. A response's first line is its answer, so later agents see only that."""

    def quote(self, response: str) -> str:
        """Returns the first line of a response."""
        return first_line(response).strip()


def draw_queries(digits: int, operations: str) -> tuple[list[Query], list[Query], list[Query]]:
    """Returns the prompt's examples, the training queries and the held-out queries.

    They are made from 4,000 different pairs of numbers (all 55 pairs if `digits` is 1): four examples, 3,597 training
    pairs and 399 held-out pairs (46 and 5), every tenth. No pair is in two of the three sets, in either order. A pair
    makes one query, or two with `both`. Differences are not negative.

    Args:
        digits: Number of digits of each number, 1 to 9.
        operations: `sums`, `differences` or `both`.
    """
    if not 1 <= digits <= MAX_DIGITS:
        raise ValueError(f"digits is {digits}, but must be 1 to {MAX_DIGITS}.")
    if operations not in ("sums", "differences", "both"):
        raise ValueError(f"operations is {operations!r}, but must be 'sums', 'differences' or 'both'.")
    rng = random.Random(f"arithmetic {digits}")
    low, high = 0 if digits == 1 else 10 ** (digits - 1), 10**digits
    count = (high - low) * (high - low + 1) // 2
    pairs: list[tuple[int, int]] = []
    for index in rng.sample(range(count), min(NUM_PAIRS, count)):
        larger = (math.isqrt(8 * index + 1) - 1) // 2  # pairs are numbered (0, 0), (1, 0), (1, 1), (2, 0), …
        smaller = index - larger * (larger + 1) // 2
        first, second = rng.sample((low + larger, low + smaller), 2)
        pairs.append((first, second))
    signs = {"sums": "+", "differences": "-", "both": "+-"}[operations]
    examples = [_query(i, *pair, signs[i % len(signs)]) for i, pair in enumerate(pairs[:NUM_EXAMPLES])]
    train: list[Query] = []
    test: list[Query] = []
    for number, pair in enumerate(pairs[NUM_EXAMPLES:], start=1):
        split = train if number % HOLD_OUT_EVERY else test
        split += [_query(len(split) + i, *pair, sign) for i, sign in enumerate(signs)]
    return examples, train, test


def _draw(digits: str = "2", operations: str = "both") -> DrawnQueries:
    if not digits.isdecimal():
        raise ValueError(f"digits is {digits!r}, but must be 1 to {MAX_DIGITS}.")
    examples, train, test = draw_queries(int(digits), operations)
    return "".join(f"{query.text} = {query.columns[ANSWER]}\n" for query in examples), train, test


def _query(number: int, first: int, second: int, sign: str) -> Query:
    if sign == "-":
        first, second = max(first, second), min(first, second)
    answer = first + second if sign == "+" else first - second
    return Query(number, f"{first} {sign} {second}", {ANSWER: str(answer)})


ARITHMETIC = TaskDefinition(
    kind=Arithmetic,
    prompt="{query} =",
    observer_prompt="Reference: {query} = {reference}\n{query} =",
    reference_separator="\nReference: {query} = ",  # for three or more agents; not in the paper
    reward="cory_env.rewards.answer:first_line_is_right",
    draw=_draw,
    formats=(NUMBER_FORMAT,),
)
