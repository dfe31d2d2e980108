r"""The reward for answers that are mathematics: 1.0 where a completion's answer has the value of the column `answer`.

    {"query": "Solve 2x = 1.", "answer": "\\frac{1}{2}"}      right: $x = 0.5$, \boxed{1/2}, \boxed{\frac12}

The package math-verify reads both and compares them by sympy (extra `math`). Of a completion it takes what is in
\boxed{}, else a final answer, else the last mathematics in it. Percentages count both ways, units do not count.
"""

import contextlib
import logging
import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from cory_env.message import Message
from cory_env.rewards.number import answer_text
from cory_env.rewards.prepared import TIMEOUT, check_with, import_extra
from cory_env.sandbox.grading import Allowance

if TYPE_CHECKING:
    from sympy import Basic

BOXED = r"\boxed{"
LIMIT = 3.0  # seconds for one completion
SHARE = 0.8  # of the time that one call of the reward may take


class TooLong(BaseException):
    """A completion takes too much time; no `except Exception` of a library takes it for its own."""


def check() -> None:
    """Finds out whether math-verify is installed.

    Raises:
        ModuleNotFoundError: It is not.
    """
    _library()


@check_with(check)
def same_value(completions: Sequence[str | list[Message]], answer: Sequence[object]) -> list[float]:
    r"""Returns 1.0 where a completion's answer has the value of the right one, else 0.0.

    A completion that takes longer than 3 s to compare, as a tower of powers does, is wrong.

    Args:
        completions: The decoded responses.
        answer: The right answers: mathematics, a solution that ends in \boxed{}, or one with the answer after `####`.

    Raises:
        ModuleNotFoundError: math-verify is not installed.
        ValueError: A right answer cannot be read.
    """
    parse, verify = _library()
    allowance = Allowance(len(completions), 1, LIMIT, float(os.environ.get(TIMEOUT, math.inf)) * SHARE)
    values = []
    for completion, gold in zip(completions, answer, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        right = _gold(gold_text(gold))
        value = 0.0
        with contextlib.suppress(TooLong), _at_most(allowance.next()):
            value = float(verify(list(right), parse(text, parsing_timeout=None), timeout_seconds=None))
        values.append(value)
    return values


def gold_text(answer: object) -> str:
    r"""Returns the answer in a column `answer` or `solution`: after the last `####`, or in the last \boxed{}, or all.

    Raises:
        ValueError: There is none, or it is no answer (`answer_text`).
    """
    whole = answer_text(answer)
    text = whole.rpartition("####")[2].strip()
    text = _last_boxed(text) if BOXED in text else text
    if not text.strip():
        raise ValueError(f"The answer {whole[-80:]!r} is empty. Write it as text, or in \\boxed{{}}.")
    return text.strip()


def _last_boxed(text: str) -> str:
    start = text.rindex(BOXED) + len(BOXED)
    depth = 1
    for end in range(start, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[start:end]
    return ""


@lru_cache(maxsize=4096)
def _gold(text: str) -> "tuple[Basic | str, ...]":
    parse, _ = _library()
    found = tuple(parse(f"{BOXED}{text}}}", parsing_timeout=None))
    if not found:
        raise ValueError(f"The answer {text!r} cannot be read as mathematics. Correct it.")
    return found


@lru_cache(maxsize=1)
def _library() -> tuple[Callable[..., list["Basic | str"]], Callable[..., bool]]:
    library = import_extra("math_verify", "math")
    # Its own time limits are whole seconds; it warns of going without.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return library.parse, library.verify


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raises `TooLong` in here once time is up. For the main thread, where a reward's process runs its function."""

    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 0.1)  # again, where something has swallowed the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
