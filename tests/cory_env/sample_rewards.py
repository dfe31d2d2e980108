"""Rewards for the tests, good and bad; the child process imports them by name."""

import os
import time

import numpy as np

BAD = "bad"  # a completion that makes a reward fail


def length(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def loud(completions: list[str]) -> list[float]:
    print("a reward may print")
    os.write(1, b"even from a library written in C\n")
    return length(completions)


def with_column(completions: list[str], answer: list[object]) -> list[float]:
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]


def count_columns(completions: list[str], **columns: list[object]) -> list[float]:
    return [float(len(columns))] * len(completions)  # the columns and prompts


def observer_bonus(completions: list[str], role: list[str]) -> list[float]:
    return [1.0 if name == "observer" else 0.0 for name in role]


def fixed(completions: list[str], value: str = "0") -> list[float]:
    return [float(value)] * len(completions)


def process_id(completions: list[str]) -> list[float]:
    return [float(os.getpid())] * len(completions)


async def asynchronous(completions: list[str]) -> list[float]:
    return length(completions)


def scalars(completions: list[str]) -> "np.ndarray":
    return np.array([len(text) for text in completions], np.float32)


def raises(completions: list[str]) -> list[float]:
    if BAD in completions:
        raise RuntimeError("this completion is beyond me")
    return length(completions)


def raises_on_two(completions: list[str]) -> list[float]:
    if len(completions) > 1:
        raise RuntimeError("one at a time")
    return length(completions)


def hangs(completions: list[str]) -> list[float]:
    while BAD in completions:
        time.sleep(0.1)
    return length(completions)


def exits(completions: list[str]) -> list[float]:
    if BAD in completions:
        os._exit(3)
    return length(completions)


def quits(completions: list[str]) -> list[float]:
    raise SystemExit("no more")


def forgets_one(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions if text != BAD]


def returns_none(completions: list[str]) -> list[float | None]:
    return [None if text == BAD else 1.0 for text in completions]


def returns_text(completions: list[str]) -> list[float | str]:
    return ["1.0" if text == BAD else 1.0 for text in completions]


def returns_nan(completions: list[str]) -> list[float]:
    return [float("nan") if text == BAD else 1.0 for text in completions]


def returns_infinity(completions: list[str]) -> list[float]:
    return [float("inf") if text == BAD else 1.0 for text in completions]


def returns_one_number(completions: list[str]) -> float:
    return 1.0
