"""Rewards for tests: some fail; one can be learned by a small model within seconds."""

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
    """Kills the parent process, as if it ran out of memory."""
    os.kill(os.getppid(), signal.SIGKILL)
    return [0.0] * len(completions)


def commas(completions: list[str]) -> list[float]:
    """One point per comma, so that there is one token to make more likely at any position."""
    return [float(completion.count(",")) for completion in completions]


def nan_if_broken(completions: list[str], broken: list[bool]) -> list[float]:
    """NaN for queries marked as broken, otherwise the length."""
    return [math.nan if bad else float(len(text)) for text, bad in zip(completions, broken, strict=True)]


def kill_runner_once(completions: list[str], flag: str) -> list[float]:
    """Kills its runner during a rollout if the file `flag` exists. It removes the file, so only one runner dies."""
    try:
        Path(flag).unlink()
    except FileNotFoundError:
        return [float(len(text)) for text in completions]
    os.kill(os.getppid(), signal.SIGKILL)
    raise AssertionError("this process ends with its runner")


def letters(completions: list[str]) -> list[float]:
    """Small integers, some of them equal."""
    return [float(len(text) % 5) for text in completions]


def from_all_inputs(prompts: list[str], completions: list[str], role: list[str]) -> list[float]:
    """A reward that depends on all its inputs."""
    columns = zip(prompts, completions, role, strict=True)
    return [len(prompt) + len(text) / 10 + len(name) / 100 for prompt, text, name in columns]


def longer(completions: list[str]) -> list[float]:
    """Rewards length, so that ending a response never pays off."""
    return [float(len(text)) for text in completions]


def only(completions: list[str], role: list[str], winner: str) -> list[float]:
    """One point for one role, none for the others. Commas add a little noise."""
    return [float(name == winner) + 0.1 * text.count(",") for name, text in zip(role, completions, strict=True)]


def flaky(completions: list[str], flag: str) -> list[float]:
    """Fails or hangs while the file `flag` contains "fail" or "hang"."""
    mode = Path(flag).read_text() if Path(flag).exists() else ""
    if mode == "fail":
        raise KeyError("no such answer")
    if mode == "hang":
        time.sleep(60)
    return letters(completions)


def long_enough(completions: list[str], limit: str = "22") -> list[str | None]:
    """Feedback: nothing is to be corrected from `limit` characters on."""
    return [None if len(text) >= int(limit) else f"{len(text)} characters" for text in completions]


def logged_feedback(completions: list[str], log: str, limit: str = "22") -> list[str | None]:
    """Like `long_enough`; logs the number of samples of each call."""
    with open(log, "a") as file:
        file.write(f"{len(completions)}\n")
    return long_enough(completions, limit)


def always_solved(completions: list[str]) -> list[str | None]:
    """Feedback without anything to correct."""
    return [None] * len(completions)


def breaks_if_broken(completions: list[str], broken: list[bool]) -> list[str | None]:
    """Feedback that raises on queries marked as broken."""
    if any(broken):
        raise ValueError("broken")
    return ["again"] * len(completions)


def has_letter(completions: list[str], letter: list[str]) -> list[str | None]:
    """Feedback: the response must contain a letter, which the data has per query; `!` cannot be checked."""
    if "!" in letter:
        raise ValueError("not a letter")
    return [None if wanted in text else f"no {wanted}" for text, wanted in zip(completions, letter, strict=True)]


def done_after_three(completions: list[str]) -> list[str | None]:
    """Feedback: nothing to correct from three characters on."""
    return [None if len(text) >= 3 else "too short" for text in completions]


def parity(completions: list[str]) -> list[float]:
    """0 or 1, so that many groups have equal rewards."""
    return [float(len(text) % 2) for text in completions]


def constant(completions: list[str]) -> list[float]:
    """The same for all."""
    return [1.0] * len(completions)


def constant_if_not_broken(completions: list[str], broken: list[bool]) -> list[float]:
    """NaN for queries marked as broken, otherwise the same for all."""
    return [math.nan if bad else 1.0 for bad in broken]
