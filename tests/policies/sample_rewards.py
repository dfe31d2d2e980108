"""Rewards for tests: one that fails, one that a small model learns within seconds."""

import os
import signal
import time


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
