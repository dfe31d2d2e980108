"""Rewards for tests, valid and failing; the child process imports them by name."""

import asyncio
import os
import signal
import time
from collections.abc import Generator

import numpy as np

from cory_env.rewards.prepared import prepare_with

BAD = "bad"  # a completion that makes a reward fail


def length(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def logged_length(completions: list[str], log: str) -> list[float]:
    """Logs the number of samples of each call."""
    with open(log, "a") as file:
        file.write(f"{len(completions)}\n")
    return length(completions)


def loud(completions: list[str]) -> list[float]:
    print("a reward may print")
    os.write(1, b"even from a library written in C\n")
    return length(completions)


def with_column(completions: list[str], answer: list[object]) -> list[float]:
    return [float(text == expected) for text, expected in zip(completions, answer, strict=True)]


def count_columns(completions: list[str], **columns: list[object]) -> list[float]:
    return [float(len(columns))] * len(completions)  # including prompts


def observer_bonus(completions: list[str], role: list[str]) -> list[float]:
    return [1.0 if name == "observer" else 0.0 for name in role]


def fixed(completions: list[str], value: str = "0", unused: str = "") -> list[float]:
    return [float(value)] * len(completions)


def value_of(completions: list[str], value: str = "0", other: str = "") -> list[float]:
    """Returns 1 for completions that are the value of a setting, 2 for those that are the other one's."""
    return [1.0 if text == value else 2.0 if text == other else 0.0 for text in completions]


def _log_preparation(log: str) -> None:
    with open(log, "a") as file:
        file.write("prepared\n")


@prepare_with(_log_preparation)
def logged_preparation(completions: list[str], log: str) -> list[float]:
    return logged_length(completions, log)


def _fail() -> None:
    raise RuntimeError("nothing can be prepared")


@prepare_with(_fail)
def preparation_fails(completions: list[str]) -> list[float]:
    return length(completions)


def process_id(completions: list[str]) -> list[float]:
    return [float(os.getpid())] * len(completions)


async def asynchronous(completions: list[str]) -> list[float]:
    return length(completions)


class Lengths:
    """An awaitable that is no coroutine, such as those of libraries for remote calls."""

    def __init__(self, completions: list[str]) -> None:
        self._completions = completions

    def __await__(self) -> Generator[None, None, list[float]]:
        yield
        return length(self._completions)


def awaitable(completions: list[str]) -> Lengths:
    return Lengths(completions)


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


def hangs_on_two(completions: list[str]) -> list[float]:
    while len(completions) > 1:
        time.sleep(0.1)
    return length(completions)


def exits_on_two(completions: list[str]) -> list[float]:
    if len(completions) > 1:
        os._exit(3)
    return length(completions)


def one_for_all(completions: list[str]) -> list[float]:
    return length(completions)[:1]


def hangs(completions: list[str]) -> list[float]:
    while BAD in completions:
        time.sleep(0.1)
    return length(completions)


def exits(completions: list[str]) -> list[float]:
    if BAD in completions:
        os._exit(3)
    return length(completions)


def _kill_self() -> None:
    """Kills this process, as the system does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def killed_at_first(completions: list[str], log: str, times: str) -> list[float]:
    """Logs each call, and kills the process in the first `times` calls."""
    logged_length(completions, log)
    with open(log) as file:
        if len(file.readlines()) <= int(times):
            _kill_self()
    return length(completions)


def killed_by_batches(completions: list[str]) -> list[float]:
    if len(completions) > 1:
        _kill_self()
    return length(completions)


def killed_by_bad(completions: list[str]) -> list[float]:
    if BAD in completions:
        _kill_self()
    return length(completions)


def quits(completions: list[str]) -> list[float]:
    raise SystemExit("no more")


def omits_one(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions if text != BAD]


def returns_1e300(completions: list[str]) -> list[float]:
    return [1e300 if text == BAD else 1.0 for text in completions]


def returns_a_huge_integer(completions: list[str]) -> list[int]:
    return [10**400 if text == BAD else 1 for text in completions]


def returns_none(completions: list[str]) -> list[float | None]:
    return [None if text == BAD else 1.0 for text in completions]


def returns_text(completions: list[str]) -> list[float | str]:
    return ["1.0" if text == BAD else 1.0 for text in completions]


def returns_nan(completions: list[str]) -> list[float]:
    return [float("nan") if text == BAD else 1.0 for text in completions]


def returns_infinity(completions: list[str]) -> list[float]:
    return [float("inf") if text == BAD else 1.0 for text in completions]


def inserts(completions: list[str]) -> list[float]:
    completions.insert(0, "an example")
    return length(completions)


def clears(completions: list[str]) -> list[float]:
    completions.clear()
    return length(completions)


def pops_words(completions: list[str], words: list[list[str]]) -> list[float]:
    """Rewards the number of words, and removes one in place."""
    return [float(len(sample)) + 0.0 * len(sample.pop()) for sample in words]


def with_default(completions: list[str], answer: list[object] | None = None) -> list[float]:
    return [0.0 if expected is None else 1.0 for expected in answer or [None] * len(completions)]


def returns_one_number(completions: list[str]) -> float:
    return 1.0


# Reward functions in the style of TRL's documentation of GRPOTrainer.


def trl_keyword_arguments(completions: list[str], **kwargs: list[object]) -> list[float]:
    return [1.0 if answer == text.strip() else 0.0 for text, answer in zip(completions, kwargs["answer"], strict=True)]


def trl_token_lengths(
    prompts: list[str], completions: list[str], completion_ids: list[list[int]], trainer_state: object = None
) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def conversational(prompts: list[list[dict[str, str]]], completions: list[list[dict[str, str]]]) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    return [float(len(text) + 100 * len(prompt)) for prompt, text in zip(prompts, texts, strict=True)]


def conversational_answer(completions: list[list[dict[str, str]]], answer: list[object]) -> list[float]:
    return [float(messages[-1]["content"] == str(right)) for messages, right in zip(completions, answer, strict=True)]


async def trl_gathers(completions: list[str], **kwargs: object) -> list[float]:
    async def judge(text: str) -> float:
        await asyncio.sleep(0.05)
        return float(len(text))

    return await asyncio.gather(*[judge(text) for text in completions])


semaphore = asyncio.Semaphore(1)


async def trl_judges_one_at_a_time(completions: list[str], **kwargs: object) -> list[float]:
    async def judge(text: str) -> float:
        async with semaphore:
            await asyncio.sleep(0.01)
            return float(len(text))

    return await asyncio.gather(*[judge(text) for text in completions])


class Brevity:
    """A reward with state."""

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def __call__(self, completions: list[str], **kwargs: object) -> list[float]:
        return [-self.weight * len(text) for text in completions]


class AsyncBrevity(Brevity):
    async def __call__(self, completions: list[str], **kwargs: object) -> list[float]:  # type: ignore[override]
        return super().__call__(completions, **kwargs)


brevity = Brevity(0.5)
async_brevity = AsyncBrevity(0.5)


def too_short(completions: list[str]) -> list[str | None]:
    """Feedback, not a reward: None from 8 characters on."""
    return [None if len(text) >= 8 else f"{len(text)} of 8 characters" for text in completions]


def tells_answer(completions: list[str], answer: list[object]) -> list[str | None]:
    return [f"The answer is {expected}." for expected in answer]


def raises_feedback(completions: list[str]) -> list[str | None]:
    if BAD in completions:
        raise RuntimeError("this completion is beyond me")
    return ["fine"] * len(completions)


def half_an_emoji(completions: list[str]) -> list[str | None]:
    return ["bad \ud83d" if BAD in text else "fine" for text in completions]


def raises_half_an_emoji(completions: list[str]) -> list[str | None]:
    if any(BAD in text for text in completions):
        raise ValueError("bad \ud83d")
    return ["fine"] * len(completions)


def numbers_as_feedback(completions: list[str]) -> list[float]:
    return [1.0] * len(completions)


def one_text(completions: list[str]) -> str:
    return "fine"


def has_word(completions: list[str], word: list[str]) -> list[float]:
    """Reads texts; the same for all lists of messages."""
    return [float(part in text) - 0.01 * len(text) for text, part in zip(completions, word, strict=True)]


def has_word_in_message(completions: list[list[dict[str, str]]], word: list[str]) -> list[float]:
    return has_word([messages[0]["content"] for messages in completions], word)


def has_lower_word(completions: list[str], word: list[str]) -> list[float]:
    """Fails on lists of messages."""
    return has_word([text.lower() for text in completions], word)


def query_length(completions: list[str], prompts: list[str]) -> list[float]:
    """Depends on the query only."""
    return [float(len(prompt)) for prompt in prompts]


def observer_length(completions: list[str], role: list[str]) -> list[float]:
    return [len(text) * (name == "observer") for text, name in zip(completions, role, strict=True)]


def token_count(completions: list[object], completion_ids: list[list[int]]) -> list[float]:
    return [float(len(tokens)) for tokens in completion_ids]


def with_query(completions: list[str], query: list[str]) -> list[float]:
    return [float(text in completion) for completion, text in zip(completions, query, strict=True)]
