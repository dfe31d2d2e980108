"""Environment classes as TRL's users write them."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any


class Counter:
    """The model has to bring a counter to 12."""

    def __init__(self, step: str = "1") -> None:
        self.step = int(step)
        self.num_resets = 0

    def reset(self, **row: Any) -> str:
        """Starts at the row's number, or at a random one."""
        self.num_resets += 1
        start = row.get("start")
        self.total = random.randint(0, 9) if start is None else int(start)
        self.row = row
        return f" The counter is at {self.total}."

    def add(self, amount: int) -> int:
        """Adds to the counter.

        Args:
            amount: What to add.
        """
        self.total += amount * self.step
        return self.total

    async def shout(self, text: str, times: int = 1) -> str:
        """Shouts a text.

        Args:
            text: The text.
            times: How often.
        """
        await asyncio.sleep(0)
        return (text.upper() + "!") * times

    def read(self) -> str:
        """Reads the row's text."""
        return str(self.row["text"])

    def hang(self, seconds: int) -> str:
        """Waits.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)
        return "awake"

    def quit(self, code: int) -> None:
        """Ends the process, which is no exception that a tool may raise.

        Args:
            code: The exit code.
        """
        raise SystemExit(code)

    def get_reward(self) -> float:
        """1 at the goal."""
        return float(self.total == 12)


class Judged:
    """A class whose reward is asynchronous, and that has no tools."""

    def reset(self, prompt: list[dict[str, str]]) -> None:
        """Keeps the prompt."""
        self.prompt = prompt

    async def get_reward(self) -> float:
        """The number of characters of the prompt."""
        return float(len(self.prompt[-1]["content"]))


FACTORIES = {"counter": Counter, "judged": Judged}


class WithoutReset:
    def get_reward(self) -> float:
        return 0.0


class WithoutReward:
    def reset(self, **row: Any) -> None:
        pass


class WithoutHints:
    def reset(self, **row: Any) -> None:
        pass

    def look(self, direction):  # type: ignore[no-untyped-def]
        """Looks."""

    def get_reward(self) -> float:
        return 0.0


class ResetReturnsNumber(WithoutReward):
    def reset(self, **row: Any) -> Any:
        return 7

    def get_reward(self) -> float:
        return 0.0


class RewardIsNone(WithoutReward):
    def get_reward(self) -> Any:
        return None
