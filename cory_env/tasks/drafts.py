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

from cory_env.tasks.answers import ANSWER, AnswerTask
from cory_env.tasks.rows import HOLD_OUT_EVERY, Source, read_queries, read_splits
from cory_env.tasks.task import Query, Task
from cory_env.tasks.template import placeholders

LOW, HIGH = 10, 100
QUERIES = 10_000
WORKING = re.compile(r"\d{3}\+\d{3}")
REWARD = "cory_env.rewards.answer:whole_is_right"

PROMPT = "{query}="
OBSERVER_PROMPT = "{query}~{reference}="
REFERENCE_SEPARATOR = "~"  # three agents or more

Terms = tuple[int, int, int]


def make(
    *,
    data: Source | None = None,
    eval_data: Source | None = None,
    reward: str | None = None,
    prompt: str | None = None,
    observer_prompt: str | None = None,
) -> Task:
    """Builds the task; see `cory_env.tasks.make_task` for the settings and errors.

    Queries of one's own have the columns `query`, such as `48+61+35`, and `answer`. With a reward of one's own there
    are no gold answers.
    """
    train, test = draw_queries()
    prompt, observer_prompt = prompt or PROMPT, observer_prompt or OBSERVER_PROMPT
    required = placeholders(prompt) | placeholders(observer_prompt) - {"reference"}
    required |= set() if reward else {ANSWER}
    if data is not None:
        train, test = read_splits(data, eval_data, required)
    elif eval_data is not None:
        test = read_queries(eval_data, required)
    return AnswerTask(
        name="drafts",
        train=train,
        test=test,
        reward=reward or REWARD,
        prompt_template=prompt,
        observer_template=observer_prompt,
        reference_separator=REFERENCE_SEPARATOR,
        solved_at=None if reward else 1.0,
    )


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
