"""Rewards for numeric answers: 1.0 if the completion's number equals that of the column `answer`, else 0.0.

Numbers are compared exactly: `18.0` equals 18, but 0.33 does not equal 1/3. See `cory_env.rewards.number` for the
supported notations. A completion without a number is wrong. An `answer` without one is an error in the data and raises.
"""

from collections.abc import Sequence

from cory_env.rewards.number import gold_number, last_number


def last_is_right(completions: Sequence[str], answer: Sequence[object]) -> list[float]:
    """Rewards the last number of the whole completion (GSM8K, paper §4).

    This is exactly the paper's rule: if a model continues with another `Question:`, the last number in there counts. So
    a policy that fails to stop loses its reward, and the failure is visible.
    """
    return [_is_right(text, gold) for text, gold in zip(completions, answer, strict=True)]


def first_line_is_right(completions: Sequence[str], answer: Sequence[object]) -> list[float]:
    """Rewards the last number of the completion's first line.

    Only that line counts, because a model without instruction tuning continues a few-shot prompt after its answer. `46`
    is right, and so is `12 + 34 = 46`.
    """
    return [_is_right(first_line(text), gold) for text, gold in zip(completions, answer, strict=True)]


def whole_is_right(completions: Sequence[str], answer: Sequence[object]) -> list[float]:
    """Rewards a completion that is the answer and nothing else; any working makes it wrong."""
    return [float(text.strip() == str(gold_number(gold))) for text, gold in zip(completions, answer, strict=True)]


def first_line(text: str) -> str:
    """Returns the first line that is not blank, stripped."""
    return next(iter(text.strip().splitlines()), "")


def _is_right(text: str, gold: object) -> float:
    return float(last_number(text) == gold_number(gold))
