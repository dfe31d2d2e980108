"""Drafts: sums of two numbers of four digits, in which an earlier answer matters.

    4728+6135=             pioneer
    4728+6135~10080513=    observer, after the pioneer wrote 10080513

The reward is 1 where the whole response is the sum (10863), else 0. A response may also be the working: the sum of each
column in two digits, here 10, 08, 05 and 13. It is worth nothing by itself, but whoever sees it has only to carry. So
what the pioneer writes can be right for itself (the sum) or useful to the observer (the working), and only a share in
the observer's reward can teach it the latter.

Nothing is downloaded: the queries are drawn, the same ones at each call. The bundled model `drafts-llama-tiny` reads
these prompts, a character a token, and has seen drafts, right and wrong; its card says what that favours.
"""

import random

from cory_env.tasks.answers import ANSWER, AnswerTask
from cory_env.tasks.rows import HOLD_OUT_EVERY, Source, read_queries, read_splits
from cory_env.tasks.task import Query, Task
from cory_env.tasks.template import placeholders

LOW, HIGH = 1000, 10_000
QUERIES = 10_000
REWARD = "cory_env.rewards.answer:whole_is_right"

PROMPT = "{query}="
OBSERVER_PROMPT = "{query}~{reference}="
REFERENCE_SEPARATOR = "~"  # three agents or more


def make(
    *,
    data: Source | None = None,
    eval_data: Source | None = None,
    reward: str | None = None,
    prompt: str | None = None,
    observer_prompt: str | None = None,
) -> Task:
    """Builds the task; see `cory_env.tasks.make_task` for the settings and errors.

    Queries of one's own have the columns `query`, such as `4728+6135`, and `answer`. With a reward of one's own there
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
    seen: set[frozenset[int]] = set()
    train: list[Query] = []
    test: list[Query] = []
    while len(seen) < QUERIES:
        terms = draw_terms(draw)
        if (same := frozenset(terms)) in seen:
            continue
        seen.add(same)
        split = train if len(seen) % HOLD_OUT_EVERY else test
        split.append(Query(len(split), "{}+{}".format(*terms), {ANSWER: str(sum(terms))}))
    return train, test


def draw_terms(draw: random.Random) -> tuple[int, int]:
    """Draws the numbers of one sum."""
    return draw.randrange(LOW, HIGH), draw.randrange(LOW, HIGH)


def working(terms: tuple[int, int]) -> str:
    """Returns the sum of each column in two digits, as in `10080513`."""
    columns = zip(*(map(int, str(term)) for term in terms), strict=True)
    return "".join(f"{sum(column):02d}" for column in columns)


def is_working(response: str) -> bool:
    """Whether a response is as long as working, right or not, and so longer than any sum."""
    return response.isdigit() and len(response) == 2 * len(str(LOW))
