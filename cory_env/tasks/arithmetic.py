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

from cory_env.rewards.answer import first_line
from cory_env.tasks.definition import Drawn, Operations, TaskDefinition, TaskSettings
from cory_env.tasks.numbers import ANSWER, FORM, NumberTask
from cory_env.tasks.rows import HOLD_OUT_EVERY
from cory_env.tasks.task import Query

DIGITS = 2
MOST_DIGITS = 9
PAIRS = 4000
EXAMPLES = 4


class Arithmetic(NumberTask):
    """The task. Of a response its first line is the answer, so that is what later agents see."""

    def quote(self, response: str) -> str:
        """Returns the first line of a response."""
        return first_line(response).strip()


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


def _draw(settings: TaskSettings) -> Drawn:
    digits = DIGITS if settings.digits is None else settings.digits
    examples, train, test = draw_queries(digits, settings.operations or "both")
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
    reference_separator="\nReference: {query} = ",  # three agents or more, ours
    reward="cory_env.rewards.answer:first_line_is_right",
    draw=_draw,
    forms=(FORM,),
)
