"""Drafts: sums of three numbers of two digits, in which an earlier answer matters.

    48+61+35=            pioneer
    48+61+35~109+035=    observer, after the pioneer wrote 109+035

The reward is 1 where the whole response is the sum (144), else 0. A response may also be the working: the sum of the
first two numbers and the third, each in three digits, which is what is left to add. It is worth nothing by itself, but
whoever sees it has one plain sum of two numbers to do. So what the pioneer writes can be right for itself (the sum) or
useful to the observer (the working), and only a share in the observer's reward can teach it the latter.

Nothing is downloaded: the queries are drawn, the same ones at each call. The bundled model `drafts-llama-tiny` reads
these prompts, a character a token, and has seen drafts, right and wrong; its card says what that favours.
"""

import random
import re

from cory_env.tasks.definition import TaskDefinition
from cory_env.tasks.numbers import ANSWER, FORM, NumberTask
from cory_env.tasks.rows import HOLD_OUT_EVERY
from cory_env.tasks.task import Query

LOW, HIGH = 10, 100
QUERIES = 10_000
WORKING = re.compile(r"\d{3}\+\d{3}")

PROMPT = "{query}="
OBSERVER_PROMPT = "{query}~{reference}="

Terms = tuple[int, int, int]


def draw_queries() -> tuple[list[Query], list[Query]]:
    """Returns the training queries and the held-out ones: 9,000 and 1,000 of 10,000 different sums.

    Two are different where they are not the same numbers in another order, so no sum is in both.
    """
    draw = random.Random("drafts")
    seen: set[tuple[int, ...]] = set()
    train: list[Query] = []
    test: list[Query] = []
    while len(seen) < QUERIES:
        terms = draw_terms(draw)
        if (same := tuple(sorted(terms))) in seen:
            continue
        seen.add(same)
        split = train if len(seen) % HOLD_OUT_EVERY else test
        split.append(Query(len(split), write(terms), {ANSWER: str(sum(terms))}))
    return train, test


def draw_terms(draw: random.Random) -> Terms:
    """Draws the numbers of one sum."""
    return draw.randrange(LOW, HIGH), draw.randrange(LOW, HIGH), draw.randrange(LOW, HIGH)


def write(terms: Terms) -> str:
    """Returns a sum as a query has it, as in `48+61+35`."""
    return "+".join(map(str, terms))


def read(query: str) -> Terms:
    """Returns the numbers of a query of the task."""
    first, second, third = map(int, query.split("+"))
    return first, second, third


def working(terms: Terms) -> str:
    """Returns what is left to add once the first two numbers are, in three digits each, as in `109+035`."""
    first, second, third = terms
    return f"{first + second:03d}+{third:03d}"


def is_working(response: str) -> bool:
    """Whether a response has the form of working, right or not."""
    return WORKING.fullmatch(response) is not None


DRAFTS = TaskDefinition(
    kind=NumberTask,
    prompt=PROMPT,
    observer_prompt=OBSERVER_PROMPT,
    reference_separator="~",  # three agents or more
    keep_separator=True,
    reward="cory_env.rewards.answer:whole_is_right",
    draw=lambda settings: ("", *draw_queries()),
    forms=(FORM,),
)
