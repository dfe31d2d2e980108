"""Drafts: sums of three two-digit numbers, a task in which an earlier response matters.

    48+61+35=            pioneer
    48+61+35~109+035=    observer, after the pioneer wrote 109+035

The reward is 1 if the whole response is the sum (144), else 0. A response may also be the working: the sum of the first
two numbers and the third number, in three digits each. Its reward is 0, but an agent that sees it only needs to add two
numbers. So the pioneer's response can be right (the sum) or useful to the observer (the working), and the pioneer can
learn the latter only if it shares the observer's reward.

The queries are generated with a fixed seed; nothing is downloaded. The bundled model `drafts-llama-tiny` reads these
prompts with one token per character. Its training data contained right and wrong drafts; its card describes the effect.
"""

import random
import re

from cory_env.tasks.definition import TaskDefinition
from cory_env.tasks.numbers import ANSWER, NUMBER_FORMAT, NumberTask
from cory_env.tasks.rows import HOLD_OUT_EVERY
from cory_env.tasks.task import Query

LOW, HIGH = 10, 100
NUM_QUERIES = 10_000
WORKING = re.compile(r"\d{3}\+\d{3}")

PROMPT = "{query}="
OBSERVER_PROMPT = "{query}~{reference}="

Terms = tuple[int, int, int]


def draw_queries() -> tuple[list[Query], list[Query]]:
    """Returns 9,000 training queries and 1,000 held-out queries.

    Sums of the same numbers in another order count as the same, so no sum is in both splits.
    """
    rng = random.Random("drafts")
    drawn: set[tuple[int, ...]] = set()
    train: list[Query] = []
    test: list[Query] = []
    while len(drawn) < NUM_QUERIES:
        terms = draw_terms(rng)
        if (sorted_terms := tuple(sorted(terms))) in drawn:
            continue
        drawn.add(sorted_terms)
        split = train if len(drawn) % HOLD_OUT_EVERY else test
        split.append(Query(len(split), format_query(terms), {ANSWER: str(sum(terms))}))
    return train, test


def draw_terms(rng: random.Random) -> Terms:
    """Draws the three numbers of a sum."""
    return rng.randrange(LOW, HIGH), rng.randrange(LOW, HIGH), rng.randrange(LOW, HIGH)


def format_query(terms: Terms) -> str:
    """Returns the text of a query, such as `48+61+35`."""
    return "+".join(map(str, terms))


def parse_query(query: str) -> Terms:
    """Returns the numbers of a query."""
    first, second, third = map(int, query.split("+"))
    return first, second, third


def format_working(terms: Terms) -> str:
    """Returns the working: the sum of the first two numbers and the third, such as `109+035`."""
    first, second, third = terms
    return f"{first + second:03d}+{third:03d}"


def is_working(response: str) -> bool:
    """Returns whether a response has the format of working, right or wrong."""
    return WORKING.fullmatch(response) is not None


DRAFTS = TaskDefinition(
    kind=NumberTask,
    prompt=PROMPT,
    observer_prompt=OBSERVER_PROMPT,
    reference_separator="~",  # for three or more agents
    keep_separator=True,
    reward="cory_env.rewards.answer:whole_is_right",
    draw=lambda: ("", *draw_queries()),
    formats=(NUMBER_FORMAT,),
)
