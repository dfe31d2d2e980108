r"""Reward for mathematical answers: 1.0 if a completion's answer has the same value as the column `answer`.

    {"query": "Solve 2x = 1.", "answer": "\\frac{1}{2}"}      right: $x = 0.5$, \boxed{1/2}, \boxed{\frac12}

The package math-verify (extra `math`) parses both and compares them with sympy. It takes a completion's \boxed{} if
there is one, otherwise a final answer, otherwise the last expression. Percentages match in both notations, and units
are ignored. Several \boxed{} are read as one set.

Feedback says why no answer can be read. It does not know the gold answer.
"""

import contextlib
import logging
import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from cory_env.message import Message
from cory_env.rewards.number import answer_text
from cory_env.rewards.prepared import TIMEOUT_VARIABLE, check_with, import_extra
from cory_env.sandbox.failures import printable_line
from cory_env.sandbox.grading import TimeBudget

if TYPE_CHECKING:
    from sympy import Basic

BOXED = r"\boxed{"
MAX_SECONDS = 3.0  # time limit of one completion
TIME_SHARE = 0.8  # share of the reward's time limit that comparisons may use
MAX_SHOWN = 120  # characters of an answer in feedback


class ComparisonTimeout(BaseException):
    """Comparing a completion takes too long. Not an `Exception`, so that no library catches it."""


def check_math_verify() -> None:
    """Checks that math-verify is installed.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    _library()


@check_with(check_math_verify)
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
    parse, verify = _library()
    budget = _time_budget(len(completions))
    values = []
    for completion, gold_answer in zip(completions, answer, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        gold_values = _parse_gold(gold_text(gold_answer))
        value = 0.0
        with contextlib.suppress(ComparisonTimeout), _time_limit(budget.next()):
            value = float(verify(list(gold_values), parse(text, parsing_timeout=None), timeout_seconds=None))
        values.append(value)
    return values


@check_with(check_math_verify)
def parse_feedback(completions: Sequence[str | list[Message]]) -> list[str | None]:
    r"""Returns feedback on the form of each completion's answer: why it cannot be read without doubt.

    Args:
        completions: The decoded responses.

    Returns:
        Per completion, one sentence or two; None if exactly one answer can be read, right or wrong: in \boxed{}, or
        marked as the final answer.

    Raises:
        ModuleNotFoundError: math-verify is not installed.
    """
    budget = _time_budget(len(completions))
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [_parse_problem(text, budget.next()) for text in texts]


def _parse_problem(text: str, seconds: float) -> str | None:
    answers: dict[str, None] = {}  # the different texts in boxes, in order
    position = text.find(BOXED)
    while position >= 0 and (answer := _close_box(text, position + len(BOXED))) is not None:
        answers[answer.strip()] = None
        position = text.find(BOXED, position + len(BOXED) + len(answer))
    if position >= 0:
        return "The brace of \\boxed{ is not closed, so the answer cannot be read."
    if "" in answers:
        return "\\boxed{} is empty. Put the final answer in it."
    if len(answers) > 1:
        shown = printable_line("; ".join(answers), MAX_SHOWN)
        return f"There are {len(answers)} different answers in \\boxed{{}}: {shown}. Write one \\boxed{{}}."
    try:
        with _time_limit(seconds):
            values = _library()[0](text, parsing_timeout=None)
            marked = bool(answers) or "####" in text or bool(_marked_parser()(text, parsing_timeout=None))
    except ComparisonTimeout:
        return "Reading the answer takes too long. Simplify it."
    shown = printable_line(next(iter(answers), str(values[-1]) if values else ""), MAX_SHOWN)
    if not values:
        return "No answer was found. Put the final answer in \\boxed{}."
    if all(isinstance(value, str) for value in values):
        return f"The answer `{shown}` cannot be parsed as mathematics."
    if not marked and text.strip(" \n$.") != str(values[-1]):
        return f"No final answer is marked; the last expression is `{shown}`. Put the final answer in \\boxed{{}}."
    return None


def gold_text(answer: object) -> str:
    r"""Returns the answer in a column `answer` or `solution`: after the last `####`, in the last \boxed{}, or all text.

    Raises:
        ValueError: The answer is empty, or has an unsupported type (`answer_text`).
    """
    full_text = answer_text(answer)
    text = full_text.rpartition("####")[2].strip()
    text = _last_boxed(text) if BOXED in text else text
    if not text.strip():
        raise ValueError(f"The answer {full_text[-80:]!r} is empty. Write it as text, or in \\boxed{{}}.")
    return text.strip()


def _last_boxed(text: str) -> str:
    return _close_box(text, text.rindex(BOXED) + len(BOXED)) or ""


def _close_box(text: str, start: int) -> str | None:
    """Returns the text from `start` to the brace that closes a box; None if there is none."""
    depth = 1
    for end in range(start, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[start:end]
    return None


@lru_cache(maxsize=4096)
def _parse_gold(text: str) -> "tuple[Basic | str, ...]":
    parse, _ = _library()
    values = tuple(parse(f"{BOXED}{text}}}", parsing_timeout=None))
    if not values:
        raise ValueError(f"The answer {text!r} cannot be parsed as mathematics. Correct it.")
    return values


@lru_cache(maxsize=1)
def _library() -> tuple[Callable[..., list["Basic | str"]], Callable[..., bool]]:
    library = import_extra("math_verify", "math")
    # Its time limits are whole seconds, and it warns if they are disabled.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return library.parse, library.verify


@lru_cache(maxsize=1)
def _marked_parser() -> Callable[..., list["Basic | str"]]:
    """Returns a parser of answers that are marked, such as "The answer is 3"."""
    library = import_extra("math_verify", "math")
    formats = (library.LatexExtractionConfig, library.ExprExtractionConfig)
    return partial(
        library.parse, extraction_config=tuple(format_(try_extract_without_anchor=False) for format_ in formats)
    )


def _time_budget(completions: int) -> TimeBudget:
    return TimeBudget(completions, 1, MAX_SECONDS, float(os.environ.get(TIMEOUT_VARIABLE, math.inf)) * TIME_SHARE)


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
