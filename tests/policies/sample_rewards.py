"""Rewards for tests: some that fail, one that a small model learns within seconds."""

import math
import os
import signal
import time
from pathlib import Path


def boom(completions: list[str]) -> list[float]:
    raise KeyError("no such answer")


def hang(completions: list[str]) -> list[float]:
    time.sleep(60)
    return [0.0] * len(completions)


def kill_runner(completions: list[str]) -> list[float]:
    """Ends the process whose child this is, as a lack of memory would."""
    os.kill(os.getppid(), signal.SIGKILL)
    return [0.0] * len(completions)


def commas(completions: list[str]) -> list[float]:
    """A point for every comma: one token to make likelier, wherever it stands."""
    return [float(completion.count(",")) for completion in completions]


def unless_broken(completions: list[str], broken: list[bool]) -> list[float]:
    """NaN where the query's row says so."""
    return [math.nan if bad else float(len(text)) for text, bad in zip(completions, broken, strict=True)]


def deadly(completions: list[str], flag: str) -> list[float]:
    """Kills its runner in mid-rollout if the file `flag` exists, which it removes, so that only one runner dies."""
    try:
        Path(flag).unlink()
    except FileNotFoundError:
        return [float(len(text)) for text in completions]
    os.kill(os.getppid(), signal.SIGKILL)
    raise AssertionError("this process ends with its runner")


def letters(completions: list[str]) -> list[float]:
    """Small whole numbers, some of them equal."""
    return [float(len(text) % 5) for text in completions]


def of_all(prompts: list[str], completions: list[str], role: list[str]) -> list[float]:
    """By all that a reward may be given."""
    columns = zip(prompts, completions, role, strict=True)
    return [len(prompt) + len(text) / 10 + len(name) / 100 for prompt, text, name in columns]


def longer(completions: list[str]) -> list[float]:
    """Pays for length, so that ending a response is never worth it."""
    return [float(len(text)) for text in completions]


def only(completions: list[str], role: list[str], winner: str) -> list[float]:
    """One point to one role, none to the others; a comma adds a little noise."""
    return [float(name == winner) + 0.1 * text.count(",") for name, text in zip(role, completions, strict=True)]


def troubled(completions: list[str], flag: str) -> list[float]:
    """Fails, or hangs, while the file `flag` says so."""
    trouble = Path(flag).read_text() if Path(flag).exists() else ""
    if trouble == "fail":
        raise KeyError("no such answer")
    if trouble == "hang":
        time.sleep(60)
    return letters(completions)
