"""`cory train` with two LLMs compared with the `MAGRPOTrainer` of CoMLRL 1.4.3 with two agents.

On both sides, two LLMs with their own full weights, in fp32, respond to the same queries without seeing each other's
responses. The reward of a pair of responses is the sum of both, and is compared with the query's other pairs (GRPO).
The sides have the same model, queries in the same order, reward function, lengths, sampling, responses per update and
per optimizer step, AdamW with the same weight decay, and cores; no KL penalty, and neither ratios nor gradients are
clipped. The clock starts with the command and stands still while held-out queries are measured.

CoMLRL has settings neither for generating responses to several queries at once nor for learning from several responses
in one forward pass, and calls the reward once per pair. `parallel_training="mp"` runs the agents in parallel threads if
the names of their devices differ (`cpu:0` and `cpu:1` are the same CPU). It gets the fastest of `SPEEDS`. Each side
gets the learning rate of `RATES` with its highest held-out reward. All are chosen on a seed that no figure uses.

Remaining differences between the objectives: in an update's second optimizer step, ours weighs tokens by their
probability ratio; CoMLRL has neither ratios nor epochs over an update's responses. It also trains on the padding after
responses, and never on the last token of a group's longest responses.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.record import Figure, Record, median
from benchmarks.side import need_package, run_module
from benchmarks.time_to_reward import CORES, Curve, ours, run_trainer, user_environment
from launch.console.configuration import read_preset

CLAIM = "two LLMs against two agents of CoMLRL's MAGRPO: the whole command ≥ 4 ×, learning ≥ 1.5 × as fast"
COMLRL = Path(os.environ.get("CORY_BENCHMARK_COMLRL", Path(__file__).parent / ".comlrl"))
ROUNDS = 3
SWEEP_SEED = 100
PRESET = "imdb-tiny"
VALUES: dict[str, Any] = {
    "knowledge_transfer": False,
    "exchange_period": None,
    "average_period": None,
    "partner_reward": 1.0,
    "advantage": "grpo",
    "kl_coef": 0.0,
    "clip_ratio": 1e6,  # CoMLRL does not clip
    "importance_sampling_clip_max": None,
    "weight_decay": 0.01,  # PyTorch's default, which CoMLRL keeps
    "grad_clip": None,
    "dtype": "fp32",
    "num_updates": 10,
    "eval_every": 10,
    "eval_queries": 512,
}
SPEEDS: tuple[dict[str, Any], ...] = (
    {"parallel_training": "none", "threads": 1},
    {"parallel_training": "none", "threads": 2},
    {"parallel_training": "mp", "threads": 1},
)
RATES = (4e-4, 8e-4, 1.6e-3)
OURS, THEIRS = "ours", "CoMLRL"


@dataclass
class TimedRun:
    """The result of one side's run."""

    curve: Curve
    phases: list[dict[str, float]]
    """By update: seconds of `generation`, `reward` and `learning`, and of the whole `update`."""

    def seconds(self, phase: str) -> float:
        """Seconds of a phase, the median of all updates."""
        return statistics.median(seconds[phase] for seconds in self.phases)

    @property
    def final_reward(self) -> float:
        """The held-out reward after the last update."""
        return self.curve.points[-1][2]


def run(folder: Path, quick: bool) -> Record:
    """Chooses the settings of both sides, then lets them take turns.

    Args:
        folder: for the runs.
        quick: one small update each, and one round.

    Raises:
        BenchmarkError: CoMLRL is not installed.
    """
    need_package(COMLRL, "comlrl", "CoMLRL 1.4.3", "comlrl==1.4.3")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    small = {"num_updates": 1, "queries_per_update": 8, "minibatch_size": 16, "eval_every": 1, "eval_queries": 8}
    values = VALUES | (small if quick else {})
    one_update = values | {"num_updates": 1, "eval_queries": 1}
    count = 1 if quick else None
    speeds = [
        comlrl_run(one_update | speed, {}, SWEEP_SEED, folder / f"speed-{number}")
        for number, speed in enumerate(SPEEDS[:count])
    ]
    fastest = SPEEDS[min(range(len(speeds)), key=lambda number: speeds[number].seconds("update"))]
    train = {OURS: partial(cory_run, values), THEIRS: partial(comlrl_run, values | fastest)}
    rates = {
        side: {rate: run_rate({"lr": rate}, SWEEP_SEED, folder / f"{side}-{rate}") for rate in RATES[:count]}
        for side, run_rate in train.items()
    }
    chosen = {side: {"lr": best_rate(of_side)} for side, of_side in rates.items()}
    sides = {side: partial(run_rate, chosen[side]) for side, run_rate in train.items()}
    runs: dict[str, list[TimedRun]] = {side: [] for side in sides}
    for number in range(1 if quick else ROUNDS):
        for side in list(sides) if number % 2 else reversed(list(sides)):
            runs[side].append(sides[side](number, folder / f"{side}-{number}"))
    settings = {**read_preset(PRESET), **values, "CoMLRL's settings": fastest, "learning rates": chosen}
    record = Record("against_comlrl", CLAIM, settings)
    record.detail = {
        "speeds": [(speed, asdict(timed)) for speed, timed in zip(SPEEDS, speeds, strict=False)],
        "rates": {side: [(rate, asdict(timed)) for rate, timed in of_side.items()] for side, of_side in rates.items()},
        "runs": {side: [asdict(timed) for timed in of_side] for side, of_side in runs.items()},
    }
    record.figures = compare(runs)
    return record


def best_rate(runs: Mapping[float, TimedRun]) -> float:
    """The learning rate whose run has the highest held-out reward after the last update."""
    return max(runs, key=lambda rate: runs[rate].final_reward)


def compare(runs: Mapping[str, list[TimedRun]]) -> list[Figure]:
    """Times and held-out rewards of both sides, and how much faster ours is in the same round."""
    figures = []
    for side, of_side in runs.items():
        figures += [
            median(f"{side}: the whole command", [timed.curve.total_seconds for timed in of_side], "s"),
            median(f"{side}: an update", [timed.seconds("update") for timed in of_side], "s"),
            median(f"{side}: generation", [timed.seconds("generation") for timed in of_side], "s"),
            median(f"{side}: rewards", [timed.seconds("reward") for timed in of_side], "s"),
            median(f"{side}: learning", [timed.seconds("learning") for timed in of_side], "s"),
            median(f"{side}: held-out reward at the start", [timed.curve.points[0][2] for timed in of_side]),
            median(f"{side}: held-out reward at the end", [timed.final_reward for timed in of_side]),
        ]
    pairs = list(zip(runs[OURS], runs[THEIRS], strict=True))
    whole = [theirs.curve.total_seconds / ours_.curve.total_seconds for ours_, theirs in pairs]
    figures.append(median("faster: the whole command", whole, "×", at_least=4.0))
    for phase, target in (("update", None), ("generation", None), ("learning", 1.5)):
        ratios = [theirs.seconds(phase) / ours_.seconds(phase) for ours_, theirs in pairs]
        figures.append(median(f"faster: {phase}", ratios, "×", at_least=target))
    return figures


def comlrl_run(values: Mapping[str, Any], rate: Mapping[str, float], seed: int, folder: Path) -> TimedRun:
    """A run of CoMLRL's trainer, with settings of ours, one of `SPEEDS`, and a learning rate.

    Raises:
        RuntimeError: it failed; the end of its output is in the message.
    """
    speed = {name: value for name, value in values.items() if name in SPEEDS[0]}
    settings = {name: value for name, value in values.items() if name not in speed}
    settings = {**read_preset(PRESET), "average_tau": 1.0, **settings, **rate, "seed": seed}
    work = {"settings": settings, "folder": str(folder), **speed}
    curve, answer = run_trainer("benchmarks.comlrl_side", COMLRL, work)
    return TimedRun(curve, answer["phases"])


def cory_run(values: Mapping[str, Any], rate: Mapping[str, float], seed: int, folder: Path) -> TimedRun:
    """A run of `cory train`; the referee measures its checkpoints afterwards, with the same sampler as CoMLRL's agents.

    Learning includes the weight sync, which CoMLRL does not need.

    Raises:
        RuntimeError: it failed; the end of its output is in the message.
    """
    curve = ours([PRESET], {**values, **rate}, seed, folder)
    phases = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        report = json.loads(line)
        if report.get("update"):
            seconds = report["seconds"]
            phases.append(
                {
                    "generation": seconds["rollout"],
                    "reward": seconds["reward"],
                    "learning": seconds["learn"] + seconds["sync"],
                    "update": seconds["total"] - seconds.get("evaluate", 0.0),
                }
            )
    rewards = run_module("benchmarks.referee", {"run": str(folder)}, user_environment())["rewards"]
    points = [(update, seconds, rewards[str(update)]) for update, seconds, _ in curve.points if str(update) in rewards]
    return TimedRun(Curve(points, curve.total_seconds), phases)
