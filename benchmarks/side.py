"""One side of a comparison in a separate process: some updates, their time, and the peak memory of all its processes.

python -m benchmarks.cory_side '{"settings": {...}, "warm_up": 1, "updates": 2}'
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.processes import Peak, cpu_seconds
from benchmarks.record import BenchmarkError

_MARK = "SIDE "

Update = Callable[[], tuple[int, dict[str, float]]]
"""One update; returns its response tokens and the seconds of its phases."""


@dataclass
class Took:
    """What a side reports. Seconds and tokens have one entry per measured update."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """CPU seconds of all its processes."""
    tokens: list[int] = field(default_factory=list)
    """Response tokens, of all policies."""
    phases: list[dict[str, float]] = field(default_factory=list)
    """Wall seconds by phase."""
    peak_mb: float = 0.0
    """Peak memory up to the end of the warm-up, PSS of all processes but Ray's daemons. Looking costs as much time as
    an update, so it ends before the clock starts."""
    peak_mb_with_daemons: float = 0.0
    peak_mb_by_process: dict[str, float] = field(default_factory=dict)
    memory: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    """The same over time: seconds since the side began, and MB by process, twice a second."""

    def time_updates(self, update: Update, updates: int) -> None:
        """Times updates."""
        for _ in range(updates):
            wall, cpu = time.perf_counter(), sum(cpu_seconds().values())
            tokens, phases = update()
            self.wall.append(time.perf_counter() - wall)
            self.cpu.append(sum(cpu_seconds().values()) - cpu)
            self.tokens.append(tokens)
            self.phases.append(phases)

    def note_memory(self, peak: Peak) -> None:
        """Takes over the peak, in MB."""
        self.peak_mb = peak.run / 1e6
        self.peak_mb_with_daemons = peak.with_daemons / 1e6
        self.peak_mb_by_process = {kind: size / 1e6 for kind, size in peak.kinds.items()}
        for second, kinds in peak.history:
            if not self.memory or second >= self.memory[-1][0] + 0.5:
                self.memory.append((second, {kind: size / 1e6 for kind, size in kinds.items()}))

    def answer(self) -> None:
        """Prints the result for `run_side`."""
        print_answer(asdict(self))


def need_package(folder: Path, package: str, name: str, install: str) -> None:
    """Requires a library that is not in the project's lock, or another version of one.

    Args:
        folder: expected location.
        package: name of the package that is imported.
        name: of the library and its version.
        install: arguments of pip to install it into the folder.

    Raises:
        BenchmarkError: it is missing; the message has the command to install it.
    """
    if not (folder / package).is_dir():
        raise BenchmarkError(
            f"{name} is not in {folder}. Install it beside the project's lock:\n"
            f"  python -m pip install --no-deps --target {folder} {install}"
        )


def read_work() -> dict[str, Any]:
    """Returns the work that this process was started for."""
    words: dict[str, Any] = json.loads(sys.argv[1])
    return words


def print_answer(answer: dict[str, Any]) -> None:
    """Prints the result for `run_module`."""
    print(_MARK + json.dumps(answer), flush=True)


def run_side(module: str, work: dict[str, Any], **environment: str) -> Took:
    """Runs `python -m module` and returns its measurements.

    Raises:
        RuntimeError: it failed; the end of its output is in the message.
    """
    return Took(**run_module(module, work, {**os.environ, **environment}))


def run_module(module: str, work: dict[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Runs `python -m module` and returns its answer.

    Raises:
        RuntimeError: it failed; the end of its output is in the message.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, json.dumps(work)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    marked = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not marked:
        raise RuntimeError(f"{module} failed with exit code {done.returncode}:\n{done.stdout[-3000:]}")
    answer: dict[str, Any] = json.loads(marked[-1].removeprefix(_MARK))
    return answer
