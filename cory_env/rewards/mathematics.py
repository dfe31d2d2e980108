r"""Reward for mathematical answers: 1.0 if a completion's answer has the same value as the column `answer`.

    {"query": "Solve 2x = 1.", "answer": "\\frac{1}{2}"}      right: $x = 0.5$, \boxed{1/2}, \boxed{\frac12}

The package math-verify (extra `math`) parses both and compares them with sympy. It takes a completion's \boxed{} if
there is one, otherwise a final answer, otherwise the last expression. Percentages match in both notations, and units
are ignored. Several \boxed{} are read as one set.
"""

import contextlib
import logging
import math
import os
import signal
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING

from cory_env.message import Message
from cory_env.rewards.number import answer_text
from cory_env.rewards.prepared import TIMEOUT_VARIABLE, check_with, import_extra
from cory_env.sandbox.grading import TimeBudget

if TYPE_CHECKING:
    from sympy import Basic

BOXED = r"\boxed{"
MAX_SECONDS = 3.0  # time limit of one completion
TIME_SHARE = 0.8  # share of the reward's time limit that comparisons may use


class ComparisonTimeout(BaseException):
    """Comparing a completion takes too long. Not an `Exception`, so that no library catches it."""


@lru_cache(maxsize=1)
def load_math_verify() -> ModuleType:
    """Imports math-verify.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    library: ModuleType = import_extra("math_verify", "math")
    # Its time limits are whole seconds, and it warns if they are disabled.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return library


@check_with(load_math_verify)
def same_value(completions: Sequence[str | list[Message]], answer: Sequence[object]) -> list[float]:
    r"""Returns 1.0 if a completion's answer has the same value as the gold answer, else 0.0.

    A completion whose comparison takes longer than 3 s, such as a tower of powers, is wrong.

    Args:
        completions: The decoded responses.
        answer: The gold answers: expressions, or solutions with the answer in \boxed{} at the end or after `####`.

    Raises:
        ModuleNotFoundError: math-verify is not installed.
        ValueError: A gold answer cannot be parsed.
    """
    library = load_math_verify()
    total = float(os.environ.get(TIMEOUT_VARIABLE, math.inf)) * TIME_SHARE
    budget = TimeBudget(len(completions), 1, MAX_SECONDS, total)
    values = []
    for completion, gold_answer in zip(completions, answer, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        gold_values = _parse_gold(gold_text(gold_answer))
        value = 0.0
        with contextlib.suppress(ComparisonTimeout), _time_limit(budget.next()):
            answers = library.parse(text, parsing_timeout=None)
            value = float(library.verify(list(gold_values), answers, timeout_seconds=None))
        values.append(value)
    return values


def gold_text(answer: object) -> str:
    r"""Returns the answer in a column `answer` or `solution`: after the last `####`, in the last \boxed{}, or all text.

    Raises:
        ValueError: The answer is empty, or has an unsupported type (`answer_text`).
    """
    full_text = answer_text(answer)
    text = full_text.rpartition("####")[2].strip()
    text = _last_boxed(text).strip() if BOXED in text else text
    if not text:
        raise ValueError(f"The answer {full_text[-80:]!r} is empty. Write it as text, or in \\boxed{{}}.")
    return text


def _last_boxed(text: str) -> str:
    """Returns the text up to the brace that closes the last box; "" if there is none."""
    start, depth = text.rindex(BOXED) + len(BOXED), 1
    for end in range(start, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[start:end]
    return ""


@lru_cache(maxsize=4096)
def _parse_gold(text: str) -> "tuple[Basic | str, ...]":
    values = tuple(load_math_verify().parse(f"{BOXED}{text}}}", parsing_timeout=None))
    if not values:
        raise ValueError(f"The answer {text!r} cannot be parsed as mathematics. Correct it.")
    return values


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises `ComparisonTimeout` inside when time is up. Works only in the main thread, which runs reward functions."""

    def stop(*_: object) -> None:
        raise ComparisonTimeout

    previous_handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 0.1)  # repeats, in case the first one is swallowed
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)
