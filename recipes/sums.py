"""`drafts-queries`: the sums of three two-digit numbers that the task drafts asks for, and their working.

`python -m recipes.sums` writes the queries again: 9,000 for training and 1,000 held out. Sums of the same numbers in
another order count as the same, so no sum is in both splits.
"""

import csv
import random
import re
from pathlib import Path

from cory_env.tasks.drafts import QUERIES
from cory_env.tasks.numbers import ANSWER
from cory_env.tasks.rows import HOLD_OUT_EVERY

LOW, HIGH = 10, 100
NUM_QUERIES = 10_000
WORKING = re.compile(r"\d{3}\+\d{3}")

Terms = tuple[int, int, int]


def write_sums(folder: Path) -> None:
    """Writes `train.csv` and `test.csv`."""
    rng = random.Random("drafts")
    drawn: set[tuple[int, ...]] = set()
    splits: dict[str, list[tuple[str, str]]] = {"train.csv": [("query", ANSWER)], "test.csv": [("query", ANSWER)]}
    while len(drawn) < NUM_QUERIES:
        terms = draw_terms(rng)
        if (sorted_terms := tuple(sorted(terms))) in drawn:
            continue
        drawn.add(sorted_terms)
        name = "train.csv" if len(drawn) % HOLD_OUT_EVERY else "test.csv"
        splits[name].append((format_query(terms), str(sum(terms))))
    for name, rows in splits.items():
        with open(folder / name, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


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


if __name__ == "__main__":
    write_sums(QUERIES)
