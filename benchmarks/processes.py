"""CPU time and memory of a run's processes by kind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

DAEMONS = "Ray's daemons"
_POLL_SECONDS = 0.05


def kinds(root: psutil.Process) -> Iterator[tuple[str, psutil.Process]]:
    """Yields the process `root` and all its descendants, each with its kind: driver, runner, reward, or one of Ray's
    own (raylet, GCS, agents, idle workers).
    """
    yield "driver", root
    for process in root.children(recursive=True):
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "cory_env.rewarding.child" in command:
            yield "reward", process
        elif command.startswith("ray::ChainRunner"):
            yield "runner", process
        else:
            yield DAEMONS, process


def cpu_seconds() -> dict[str, float]:
    """CPU seconds so far of this process and its descendants, by kind."""
    total: dict[str, float] = {}
    for kind, process in kinds(psutil.Process()):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total[kind] = total.get(kind, 0.0) + times.user + times.system
    return total


class Peak:
    """The largest memory seen: PSS, in which a page shared by n processes counts 1/n in each, so their sum counts it
    once. Ray's object store and weights in /dev/shm are in it, at the processes that have touched them.
    """

    def __init__(self) -> None:
        """Starts from nothing."""
        self.run = 0
        """Bytes of driver, runners and reward together, at their common peak."""
        self.with_daemons = 0
        """Bytes with Ray's daemons."""
        self.kinds: dict[str, int] = {}
        """Bytes by kind when `run` was largest."""
        self.history: list[tuple[float, dict[str, int]]] = []
        """Seconds since the first look, and bytes by kind, of each look."""
        self._began = time.monotonic()

    def look(self) -> None:
        """Compares with the memory now."""
        now: dict[str, int] = {}
        for kind, process in kinds(psutil.Process()):
            now[kind] = now.get(kind, 0) + _pss(process.pid)
        self.history.append((time.monotonic() - self._began, now))
        total = sum(now.values())
        if total - now.get(DAEMONS, 0) > self.run:
            self.run, self.kinds = total - now.get(DAEMONS, 0), now
        self.with_daemons = max(self.with_daemons, total)


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0  # it has ended
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


@contextmanager
def watched_memory() -> Iterator[Peak]:
    """Looks at the memory of this process and its descendants 20 times a second."""
    peak, done = Peak(), threading.Event()

    def watch() -> None:
        while not done.wait(_POLL_SECONDS):
            peak.look()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
        peak.look()
