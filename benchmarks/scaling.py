"""How an update's time and memory grow with batch, response length, vocabulary and runners, one at a time."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.models import make_model
from benchmarks.record import Figure, Record
from benchmarks.side import run_side
from launch.configuration import read_preset

CLAIM = "time and memory of an update as batch, length, vocabulary and runners grow"


def run(folder: Path, quick: bool) -> Record:
    """Runs every point in processes of its own."""
    size = "test" if quick else "5M"
    base: dict[str, Any] = read_preset("imdb-tiny") | {"model": make_model(size, folder), "eval_every": 10**6}
    record = Record("scaling", CLAIM, base)
    points: dict[str, dict[str, Any]] = {"as shipped: batch 128, 12 tokens, vocabulary 4,096, 1 runner": {}}
    if quick:
        points = {"batch 8": {"queries": 8, "minibatch": 8}}
    else:
        points |= {f"batch {n}": {"queries": n} for n in (64, 256, 512)}
        points |= {f"{n} response tokens": {"max_response": n, "max_prompt": 64 + n} for n in (24, 48, 96)}
        points["vocabulary 50,257"] = {"model": make_model("5M-50k", folder)}
        points["2 runners"] = {"num_runners": 2}
    for label, changes in points.items():
        took = run_side("benchmarks.cory_side", {"settings": base | changes, "warm_up": 1, "updates": 3})
        phases = {name: statistics.median(one[name] for one in took.phases) for name in ("rollout", "learn", "sync")}
        record.figures += [
            Figure(f"{label}: an update", statistics.median(took.wall), "s"),
            *(Figure(f"{label}: {name}", seconds, "s") for name, seconds in phases.items()),
            Figure(f"{label}: CPU", statistics.median(took.cpu), "CPU-s"),
            Figure(f"{label}: response tokens", statistics.median(took.tokens)),
            Figure(f"{label}: peak memory", took.peak_mb, "MB"),
        ]
        record.detail[label] = vars(took)
    return record
