"""How an update's time and memory grow with batch, response length, agents and turns, one at a time.

`python -m benchmarks.growth FILE.png` draws the curves of the last `python -m benchmarks growth`.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.models import make_model
from benchmarks.record import RESULTS, Figure, Record
from benchmarks.side import Took, run_side
from launch.console.configuration import read_preset

CLAIM = "time and memory of an update grow at most in proportion to batch, response length, agents and turns"
MAX_SLOPE = 1.05
PROMPT_TOKENS = 2048
"""Tokens that hold eight turns of a Sudoku whole."""
ADAPTERS: dict[str, Any] = {"weights": "lora", "observed": "last", "queries_per_update": 16, "minibatch_size": 16}


def axes(folder: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """What grows → its size → the settings."""
    lengths = {n: {"max_response_tokens": n, "max_prompt_tokens": 64 + n} for n in (12, 24, 48, 96)}
    env = {
        **{"task": "custom", "data": None, "eval_data": None, "reward": None, "roles": [{"name": "solver"}]},
        **{"model": make_model("5M-4k", folder), "num_agents": 1, "exchange_period": None, "credit": "sum"},
        # Each prompt is generated from once; groups would share the first turn's.
        **{"advantage": "reinforce", "num_generations": 1, "queries_per_update": 16, "minibatch_size": 16},
        **{"max_prompt_tokens": PROMPT_TOKENS, "max_query_tokens": None, "min_query_tokens": None},
    }
    return {
        "batch": {n: {"queries_per_update": n} for n in (64, 128, 256, 512)},
        "response tokens": lengths,
        "agents": {n: {**ADAPTERS, "num_agents": n} for n in (1, 2, 4, 8)},
        "turns": {n: {**env, "env": f"cory_env.text_envs.sudoku:repair?turns={n}"} for n in (1, 2, 4, 8)},
    }


def run(folder: Path, quick: bool, only: str = "") -> Record:
    """Runs every point in separate processes.

    Args:
        only: what grows; empty for all.
    """
    base: dict[str, Any] = read_preset("imdb-tiny-paper") | {"eval_every": 10**6, "dtype": "fp32"}
    base["model"] = make_model("test" if quick else "5M", folder)
    record = Record("growth", CLAIM, base)
    for axis, points in axes(folder).items():
        if quick:
            small = {"queries_per_update": 8, "minibatch_size": 8, "model": base["model"] if axis != "turns" else None}
            points = {n: points[n] | {k: v for k, v in small.items() if v} for n in [*points][:1]}
        if only in ("", axis):
            measure(record, axis, points, 1 if quick else 3)
    return record


def measure(record: Record, axis: str, points: dict[int, dict[str, Any]], updates: int) -> None:
    """Adds the time and memory of an update at every point, and their slopes.

    Args:
        points: size → settings beside the record's.
        updates: how many are measured, after one that does not count; a figure is their median.
    """
    measured: dict[int, Took] = {}
    for size, changes in points.items():
        settings = {name: value for name, value in (record.settings | changes).items() if value is not None}
        measured[size] = run_side("benchmarks.cory_side", {"settings": settings, "warm_up": 1, "updates": updates})
        took = measured[size]
        phases = {name: statistics.median(one[name] for one in took.phases) for name in ("rollout", "learn")}
        record.figures += [
            Figure(f"{axis} {size}: an update", statistics.median(took.wall), "s"),
            *(Figure(f"{axis} {size}: {name}", seconds, "s") for name, seconds in phases.items()),
            Figure(f"{axis} {size}: CPU", statistics.median(took.cpu), "CPU-s"),
            Figure(f"{axis} {size}: response tokens", statistics.median(took.tokens)),
            Figure(f"{axis} {size}: peak memory", took.peak_mb, "MB"),
        ]
    curves = {
        "time": [statistics.median(took.cpu) for took in measured.values()],
        "memory": [took.peak_mb for took in measured.values()],
    }
    record.detail[axis] = {"sizes": [*measured], **curves}
    if len(measured) > 1:
        for name, values in curves.items():
            label = f"{axis}: slope of {'CPU time' if name == 'time' else 'peak memory'}"
            record.figures.append(Figure(label, slope([*measured], values), at_most=MAX_SLOPE))


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The exponent k of the least-squares fit value ∝ size^k."""
    return statistics.linear_regression([*map(math.log, sizes)], [*map(math.log, values)]).slope


def draw(record: dict[str, Any], file: Path) -> None:
    """Draws time and memory over each size, both axes logarithmic, with the slopes."""
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(9, 3.6), layout="constrained", dpi=120)
    for panel, (name, unit) in zip(
        picture.subplots(1, 2), {"time": "CPU-s per update", "memory": "MB at the peak"}.items(), strict=True
    ):
        for axis, curve in record["detail"].items():
            sizes = [size / curve["sizes"][0] for size in curve["sizes"]]
            label = f"{axis} from {curve['sizes'][0]}: slope {slope(sizes, curve[name]):.2f}"
            panel.plot(sizes, curve[name], marker="o", markersize=4, label=label)
        panel.set(xscale="log", yscale="log", xlabel="size, relative to the smallest", ylabel=unit)
        panel.set_ylim(bottom=panel.get_ylim()[0] / 2, top=panel.get_ylim()[1] * 6)
        panel.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8, loc="upper left")
    picture.savefig(file)


if __name__ == "__main__":
    draw(json.loads((RESULTS / "growth.json").read_text(encoding="utf-8")), Path(sys.argv[1]))
