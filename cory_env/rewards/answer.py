"""Rewards for answers that are a number: 1.0 where the completion's is that of the column `answer`, else 0.0.

Numbers are compared exactly, so `18.0` is 18 and 0.33 is not 1/3; `cory_env.rewards.number` says how they are read. A
completion without a number is wrong. An answer without one is a mistake in the data and raises.
"""

from collections.abc import Sequence

from cory_env.rewards.number import gold_number, last_number


def last_is_right(completions: Sequence[str], answer: Sequence[object]) -> list[float]:
    """Looks at the last number of the whole completion (GSM8K, paper §4).

    That is the paper's rule to the letter: where a model runs on and invents another `Question:`, the last number in
    there counts. So a policy that forgets to stop loses its reward, and the failure shows.
    """
    return [_right(text, gold) for text, gold in zip(completions, answer, strict=True)]


def first_line_is_right(completions: Sequence[str], answer: Sequence[object]) -> list[float]:
    """Looks at the last number of the completion's first line.

    A model without instruction tuning goes on with a few-shot prompt after its answer, line after line; only its answer
    counts. `46` is right, and so is `12 + 34 = 46`.
    """
    return [_right(first_line(text), gold) for text, gold in zip(completions, answer, strict=True)]


def whole_is_right(completions: Sequence[str], answer: Sequence[object]) -> list[float]:
    """Looks at the whole completion, which must be the answer and nothing else: working beside it is wrong."""
    return [float(text.strip() == str(gold_number(gold))) for text, gold in zip(completions, answer, strict=True)]


def first_line(text: str) -> str:
    """Returns the first line that is not blank, without the space around it."""
    return next(iter(text.strip().splitlines()), "")


def _right(text: str, gold: object) -> float:
    return float(last_number(text) == gold_number(gold))
