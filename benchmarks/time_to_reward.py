"""How soon a run reaches a held-out combined reward, against TRL's `RLOOTrainer` and `GRPOTrainer`.

All sides learn from 256 responses an update, with the same model, queries, reward function, KL penalty, mini-batches
and epochs, on the same cores. The clock starts with the command and stands still while held-out queries are measured.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.record import Figure, Record, median
from benchmarks.side import need_trl
from launch.console.configuration import read_preset

CLAIM = "the recommended preset reaches TRL's rewards ≥ 3 × as soon as TRL's best; RLOO against RLOO ≥ 2 × in fp32"
TRL = Path(os.environ.get("CORY_BENCHMARK_TRL_1", Path(__file__).parent / ".trl-1"))
CORES = 2
RATES = (1e-4, 2e-4, 4e-4)
"""Learning rates that are tried for TRL, on a seed that no figure is from."""
LEVELS = (0.2, 0.3, 0.4)
"""Held-out combined rewards whose time is taken; the bundled model starts at about 0."""
ALIKE: dict[str, Any] = {"dtype": "fp32", "updates": 20, "eval_every": 5, "eval_queries": 512, "minibatch": 64}
SINGLE: dict[str, Any] = {"num_agents": 1, "advantage": "rloo", "num_generations": 4, "queries": 64}
OURS: dict[str, list[str]] = {
    "imdb-tiny": ["imdb-tiny"],
    "RLOO": ["imdb-tiny-ppo", *(f"{key}={value}" for key, value in SINGLE.items())],
    "PPO": ["imdb-tiny-ppo", "queries=256"],
}


@dataclass
class Curve:
    """What one side's run was like."""

    points: list[tuple[int, float, float]]
    """Updates, seconds since the command without those of evaluations, held-out combined reward."""
    whole: float
    """Seconds of the whole command, without those of evaluations."""

    def seconds_to(self, level: float) -> float:
        """When a straight line through the points first reaches a reward; infinite if it never does."""
        for (_, before, low), (_, after, high) in zip(self.points, self.points[1:], strict=False):
            if high >= level:
                return before + (after - before) * max(level - low, 0.0) / (high - low) if high > low else before
        return float("inf")


Side = Callable[[int, Path], Curve]
"""Runs a side once, with a seed and a folder that is not there yet."""


def run(folder: Path, quick: bool) -> Record:
    """Tries TRL's learning rates, then lets its best take turns with ours.

    Raises:
        BenchmarkError: TRL is not there.
    """
    need_trl(TRL, "TRL 1.16", "trl==1.16.0")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    values = ALIKE | ({"updates": 1, "eval_every": 1, "eval_queries": 8} if quick else {})
    tried = {
        (trainer, rate): theirs(trainer, rate, values, 100, folder / f"{trainer}-{rate}")
        for trainer in ("rloo", "grpo")
        for rate in (RATES[:1] if quick else RATES)
    }
    best = {
        trainer: max((rate for name, rate in tried if name == trainer), key=lambda rate: _late(tried[trainer, rate]))
        for trainer in ("rloo", "grpo")
    }
    sides: dict[str, Side] = {
        **{f"TRL {trainer.upper()}": partial(theirs, trainer, rate, values) for trainer, rate in best.items()},
        **{f"ours, {name}": partial(ours, words, values) for name, words in OURS.items()},
    }
    record = Record("time_to_reward", CLAIM, {**values, "TRL's learning rates": best})
    record.detail["sweep"] = {f"{trainer} {rate}": curve.points for (trainer, rate), curve in tried.items()}
    curves: dict[str, list[Curve]] = {side: [] for side in sides}
    for number in range(1 if quick else 3):
        for side in list(sides) if number % 2 else reversed(list(sides)):
            curves[side].append(sides[side](number, folder / f"{side}-{number}"))
    record.detail["curves"] = {side: [vars(curve) for curve in of_side] for side, of_side in curves.items()}
    record.figures += compare(curves)
    return record


def compare(curves: dict[str, list[Curve]]) -> list[Figure]:
    """Times and rewards of each side, and how much sooner ours are than TRL's in the same round."""
    found = []
    for side, of_side in curves.items():
        found.append(median(f"{side}: the whole command", [curve.whole for curve in of_side], "s"))
        found.append(median(f"{side}: reward of its last two evaluations", [_late(curve) for curve in of_side]))
        for level in LEVELS:
            found.append(median(f"{side}: until {level}", [curve.seconds_to(level) for curve in of_side], "s"))
    for ours_, their, target in (("imdb-tiny", "best", 3.0), ("PPO", "best", None), ("RLOO", "RLOO", 2.0)):
        names = [name for name in curves if name.startswith("TRL") and their in ("best", name.removeprefix("TRL "))]
        rounds = list(zip(curves[f"ours, {ours_}"], zip(*(curves[name] for name in names), strict=True), strict=True))
        whole = [min(one.whole for one in others) / own.whole for own, others in rounds]
        found.append(median(f"{ours_}: whole command, sooner than TRL's {their}", whole, "×", at_least=target))
        for level in LEVELS:
            sooner = [min(one.seconds_to(level) for one in others) / own.seconds_to(level) for own, others in rounds]
            sooner = [ratio for ratio in sooner if ratio == ratio]  # none of the round's runs got there
            if sooner:
                found.append(median(f"{ours_}: until {level}, sooner than TRL's {their}", sooner, "×", at_least=target))
    return found


def theirs(trainer: str, rate: float, values: dict[str, Any], seed: int, folder: Path) -> Curve:
    """A run of one of TRL's trainers.

    Raises:
        RuntimeError: it failed; the end of its output is in the message.
    """
    settings = read_preset("imdb-tiny-ppo") | SINGLE | values | {"seed": seed}
    began = time.time()
    work = {"settings": settings, "trainer": trainer, "lr": rate, "folder": str(folder), "began": began}
    paths = f"{TRL}{os.pathsep}{os.environ.get('PYTHONPATH', os.getcwd())}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.trl_trainer_side", json.dumps(work)],
        env=_as_a_user() | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    took = time.time() - began
    answers = [line for line in done.stdout.splitlines() if line.startswith("SIDE ")]
    if done.returncode or not answers:
        raise RuntimeError(f"TRL failed with exit code {done.returncode}:\n{done.stdout[-3000:]}")
    answer = json.loads(answers[-1].removeprefix("SIDE "))
    return Curve([(int(u), float(s), float(r)) for u, s, r in answer["curve"]], took - answer["paused"])


def ours(words: Sequence[str], values: dict[str, Any], seed: int, folder: Path) -> Curve:
    """A run of `cory train`.

    Raises:
        RuntimeError: it failed; the end of its output is in the message.
    """
    given = [f"{key}={value}" for key, value in {**values, "seed": seed}.items()]
    command = [sys.executable, "-u", "-m", "launch.main", "train", *words, *given, "--out", str(folder)]
    seen, printed = [], {}  # the seconds at which a line came
    began = time.time()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=_as_a_user()
    ) as process:
        for line in process.stdout or ():
            seen.append(line)
            if line.startswith("Evaluating the start"):
                printed[-1] = time.time() - began
            elif found := re.match(r" *(\d+)/\d+ +held-out", line):
                printed[int(found[1])] = time.time() - began
    took = time.time() - began
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{''.join(seen[-20:])}")
    paused = printed[0] - printed[-1]
    points: list[tuple[int, float, float]] = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        report = json.loads(line)
        if "evaluation" in report:
            update = int(report.get("update", 0))
            paused += report.get("seconds", {}).get("evaluate", 0.0)
            points.append((update, printed[update] - paused, report["evaluation"]["mean"]["combined_reward"]))
    return Curve(points, took - paused)


def _as_a_user() -> dict[str, str]:
    """The environment, without the number of threads that benchmarks are pinned to."""
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


def _late(curve: Curve) -> float:
    """The mean reward of the last two evaluations."""
    return statistics.mean(reward for *_, reward in curve.points[-2:])
