"""Compares pieces of work on a noisy machine: they take turns, and only ratios within one turn count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Clock = Literal["cpu", "wall"]


@dataclass
class Turns:
    """Seconds that each side took, one entry per round; `cpu` counts all threads of this process, no other process."""

    cpu: dict[str, list[float]] = field(default_factory=dict)
    wall: dict[str, list[float]] = field(default_factory=dict)

    def seconds(self, side: str, clock: Clock) -> float:
        """Median of one side."""
        return statistics.median(getattr(self, clock)[side])

    def ratios(self, side: str, to: str, clock: Clock) -> list[float]:
        """`side` over `to`, round by round."""
        clocked = getattr(self, clock)
        return [one / other for one, other in zip(clocked[side], clocked[to], strict=True)]

    def ratio(self, side: str, to: str, clock: Clock) -> float:
        """Median of `ratios`."""
        return statistics.median(self.ratios(side, to, clock))


def alternate(sides: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 1) -> Turns:
    """Runs all sides `rounds` times, in an order that turns around from round to round.

    Args:
        sides: name → work.
        rounds: turns that count.
        warm_up: turns before them that do not.
    """
    turns = Turns({side: [] for side in sides}, {side: [] for side in sides})
    for turn in range(-warm_up, rounds):
        for side in list(sides) if turn % 2 else reversed(list(sides)):
            wall, cpu = time.perf_counter(), time.process_time()
            sides[side]()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if turn >= 0:
                turns.wall[side].append(wall)
                turns.cpu[side].append(cpu)
    return turns
