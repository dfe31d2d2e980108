"""Time until a run reaches a held-out combined reward, compared with TRL's `RLOOTrainer` and `GRPOTrainer`.

All sides learn from 256 responses an update, with the same model, queries, reward function, KL penalty and
mini-batches, on the same cores; learning rate and epochs are each side's own. The clock starts with the command and
stands still while held-out queries are measured.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.record import BenchmarkError, Figure, Record, median
from benchmarks.side import need_package, run_module
from launch.console.configuration import read_preset

CLAIM = "the recommended preset reaches TRL's rewards ≥ 3 × as soon as TRL's best; RLOO ≥ 2 × (fp32), ≥ 2.5 × (bf16)"
TRL = Path(os.environ.get("CORY_BENCHMARK_TRL_1", Path(__file__).parent / ".trl-1"))
CORES = 2
ROUNDS = 5


@dataclass(frozen=True)
class Contest:
    """A task and the sides that compete on it."""

    single: str
    """The preset of runs with one agent, overridden by `values` and `settings`."""
    settings: dict[str, Any]
    """What makes it a single agent with as many responses an update."""
    values: dict[str, Any]
    """Settings of all runs."""
    ours: dict[str, list[str]]
    """Settings of `cory train` by side. `RLOO…` is compared with TRL's RLOO, the others with its best."""
    choices: tuple[dict[str, Any], ...]
    """Settings to try for TRL, on a seed that no figure uses; the one that is first at the highest level is taken."""
    levels: tuple[float, ...]
    """Held-out combined rewards; the time to reach each is measured."""
    trainers: tuple[str, ...] = ("rloo", "grpo")
    goals: dict[str, float] = field(default_factory=dict)


def _words(values: Mapping[str, Any]) -> list[str]:
    """Settings, as the command line takes them."""
    return [f"{name}={'null' if value is None else value}" for name, value in values.items()]


def choices(rate: float) -> tuple[dict[str, Any], ...]:
    """Settings for TRL to try: two epochs with `rate` and twice as high, one epoch with rates twice as high again."""
    pairs = (2, rate), (2, 2 * rate), (1, 2 * rate), (1, 4 * rate)
    return tuple({"num_epochs": epochs, "lr": lr} for epochs, lr in pairs)


RLOO: dict[str, Any] = {"num_agents": 1, "advantage": "rloo", "num_generations": 4, "queries_per_update": 64}
FILMS = Contest(
    "imdb-tiny-ppo",
    RLOO,
    {"dtype": "fp32", "num_updates": 20, "eval_every": 5, "eval_queries": 512, "minibatch_size": 64},
    {
        "imdb-tiny": ["imdb-tiny", "average_period=5", "average_tau=1.0"],  # the preset when it was measured
        "RLOO": ["imdb-tiny-ppo", *_words(RLOO)],
        "RLOO, old_logprobs=sampler": ["imdb-tiny-ppo", *_words(RLOO), "old_logprobs=sampler"],
        "PPO": ["imdb-tiny-ppo", "queries_per_update=256"],
    },
    choices(2e-4),
    (0.2, 0.3, 0.4),  # the bundled model starts at about 0
    goals={"imdb-tiny": 3.0, "RLOO": 2.0},
)
SUMS: dict[str, Any] = RLOO | {"num_policies": None, "credit": "sum", "chain_gamma": 1.0, "minibatch_size": 128}
CONTESTS = {
    "films": FILMS,
    "films-bf16": replace(
        FILMS,
        values=FILMS.values | {"dtype": "bf16"},
        ours={side: words for side, words in FILMS.ours.items() if side != "PPO"},
        trainers=("rloo",),
        goals={"imdb-tiny": 3.0, "RLOO": 2.5},
    ),
    "sums": Contest(
        "drafts-tiny",
        SUMS,
        {"dtype": "fp32", "num_updates": 40, "eval_every": 5, "eval_queries": 256},
        {"drafts-tiny-team": ["drafts-tiny-team"]},
        choices(5e-4),
        (0.4, 0.5, 0.6, 0.8),
        trainers=("rloo",),
        goals={"drafts-tiny-team": 3.0},
    ),
}


@dataclass
class Curve:
    """The result of one side's run."""

    points: list[tuple[int, float, float]]
    """Updates, seconds since the command without those of evaluations, held-out combined reward."""
    total_seconds: float
    """Seconds of the whole command, without those of evaluations."""

    def seconds_to(self, level: float) -> float:
        """Time at which the linearly interpolated curve first reaches a reward; infinite if it never does."""
        for (_, before, low), (_, after, high) in zip(self.points, self.points[1:], strict=False):
            if high >= level:
                return before + (after - before) * max(level - low, 0.0) / (high - low) if high > low else before
        return float("inf")


Side = Callable[[int, Path], Curve]
"""Runs a side once, with a seed and a folder that does not exist yet."""


def run(folder: Path, quick: bool, only: str = "") -> Record:
    """Tries TRL's settings, then lets its best take turns with ours, in each contest.

    Args:
        folder: for the runs.
        quick: one update each, and one round.
        only: name of one contest; empty for all.

    Raises:
        BenchmarkError: TRL is not installed, or no contest has that name.
    """
    need_package(TRL, "trl", "TRL 1.16", "trl==1.16.0")
    if only and only not in CONTESTS:
        raise BenchmarkError(f"There is no contest `{only}`. They are: {', '.join(CONTESTS)}.")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    record = Record("time_to_reward", CLAIM, {})
    for name in [only] if only else CONTESTS:
        hold(name, folder / name, quick, record)
    return record


def hold(name: str, folder: Path, quick: bool, record: Record) -> None:
    """Runs a contest and adds its results."""
    contest = CONTESTS[name]
    if quick:
        values = contest.values | {"num_updates": 1, "warmup_updates": 0, "eval_every": 1, "eval_queries": 8}
        contest = replace(contest, values=values, choices=contest.choices[:1])
    tried: dict[str, list[tuple[Curve, dict[str, Any]]]] = {
        trainer: [
            (theirs(contest, trainer, choice, 100, folder / f"{trainer}-{number}"), choice)
            for number, choice in enumerate(contest.choices)
        ]
        for trainer in contest.trainers
    }

    def rank(entry: tuple[Curve, dict[str, Any]]) -> tuple[float, float]:
        return entry[0].seconds_to(contest.levels[-1]), -_late(entry[0])

    best = {trainer: min(entries, key=rank)[1] for trainer, entries in tried.items()}
    sides: dict[str, Side] = {
        **{f"TRL {trainer.upper()}": partial(theirs, contest, trainer, choice) for trainer, choice in best.items()},
        **{f"ours, {side}": partial(ours, words, contest.values) for side, words in contest.ours.items()},
    }
    curves: dict[str, list[Curve]] = {side: [] for side in sides}
    for number in range(1 if quick else ROUNDS):
        for side in list(sides) if number % 2 else reversed(list(sides)):
            curves[side].append(sides[side](number, folder / f"{side}-{number}"))
    record.settings[name] = {**contest.values, "TRL's settings": best}
    record.detail[name] = {
        "sweep": {trainer: [(choice, vars(curve)) for curve, choice in entries] for trainer, entries in tried.items()},
        "curves": {side: [vars(curve) for curve in of_side] for side, of_side in curves.items()},
    }
    record.figures += [replace(figure, label=f"{name}: {figure.label}") for figure in compare(contest, curves)]


def compare(contest: Contest, curves: Mapping[str, list[Curve]]) -> list[Figure]:
    """Times and rewards of each side, and how much sooner ours are than TRL's in the same round."""
    match = []
    for side, of_side in curves.items():
        match.append(median(f"{side}: the whole command", [curve.total_seconds for curve in of_side], "s"))
        match.append(median(f"{side}: reward of its last two evaluations", [_late(curve) for curve in of_side]))
        for level in contest.levels:
            match.append(median(f"{side}: until {level}", [curve.seconds_to(level) for curve in of_side], "s"))
    for ours_ in contest.ours:
        their, target = "RLOO" if ours_.startswith("RLOO") else "best", contest.goals.get(ours_)
        names = [name for name in curves if name.startswith("TRL") and their in ("best", name.removeprefix("TRL "))]
        rounds = list(zip(curves[f"ours, {ours_}"], zip(*(curves[name] for name in names), strict=True), strict=True))
        total_seconds = [min(one.total_seconds for one in others) / ours.total_seconds for ours, others in rounds]
        match.append(median(f"{ours_}: whole command, sooner than TRL's {their}", total_seconds, "×", at_least=target))
        for level in contest.levels:
            sooner = [min(one.seconds_to(level) for one in others) / ours.seconds_to(level) for ours, others in rounds]
            sooner = [ratio for ratio in sooner if ratio == ratio]  # none of the round's runs got there
            if sooner:
                match.append(median(f"{ours_}: until {level}, sooner than TRL's {their}", sooner, "×", at_least=target))
    return match


def theirs(contest: Contest, trainer: str, choice: dict[str, Any], seed: int, folder: Path) -> Curve:
    """A run of one of TRL's trainers.

    Raises:
        RuntimeError: it failed; the end of its output is in the message.
    """
    settings = read_preset(contest.single) | contest.settings | contest.values | choice | {"seed": seed}
    work = {"settings": settings, "trainer": trainer, "folder": str(folder)}
    return run_trainer("benchmarks.trl_trainer_side", TRL, work)[0]


def run_trainer(module: str, library: Path, work: dict[str, Any]) -> tuple[Curve, dict[str, Any]]:
    """A run of another library's trainer in a separate process.

    Args:
        module: the one that runs it.
        library: folder of the library.
        work: what the module needs, besides the time at which it starts.

    Returns:
        The curve, and the answer of the module.

    Raises:
        RuntimeError: it failed; the end of its output is in the message.
    """
    paths = f"{library}{os.pathsep}{os.environ.get('PYTHONPATH', os.getcwd())}"
    began = time.time()
    answer = run_module(module, {**work, "began": began}, user_environment() | {"PYTHONPATH": paths})
    took = time.time() - began
    return Curve([(int(u), float(s), float(r)) for u, s, r in answer["curve"]], took - answer["paused"]), answer


def ours(words: Sequence[str], values: dict[str, Any], seed: int, folder: Path) -> Curve:
    """A run of `cory train`; its reward is that of the answer for which the preset selects.

    Raises:
        RuntimeError: it failed; the end of its output is in the message.
    """
    arguments = [*words, *_words({**values, "seed": seed})]
    command = [sys.executable, "-u", "-m", "cory_rllib", "train", *arguments, "--out", str(folder)]
    times, printed = [], {}  # the seconds at which a line came
    began = time.time()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=user_environment()
    ) as process:
        for line in process.stdout or ():
            times.append(line)
            if line.startswith("Evaluating the untrained policies"):
                printed[-1] = time.time() - began
            elif match := re.match(r" *(\d+)/\d+ +held-out", line):
                printed[int(match[1])] = time.time() - began
    took = time.time() - began
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{''.join(times[-20:])}")
    bare = read_preset(words[0]).get("select_by", "bare") == "bare"
    paused = printed[0] - printed[-1]
    points: list[tuple[int, float, float]] = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        report = json.loads(line)
        if "evaluation" in report:
            update = int(report.get("update", 0))
            paused += report.get("seconds", {}).get("evaluate", 0.0)
            measured = report["evaluation"]["mean"] if bare else report["last_response"]
            points.append((update, printed[update] - paused, measured["combined_reward"]))
    return Curve(points, took - paused)


def user_environment() -> dict[str, str]:
    """The environment, without the number of threads that benchmarks are pinned to."""
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


def _late(curve: Curve) -> float:
    """The mean reward of the last two evaluations."""
    return statistics.mean(reward for *_, reward in curve.points[-2:])
