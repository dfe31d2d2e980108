"""How an update's time and memory grow with batch, response length, vocabulary and runners, one at a time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.models import make_model
from benchmarks.record import Figure, Record
from benchmarks.side import run_side
from launch.console.configuration import read_preset

CLAIM = "time and memory of an update as batch, length, vocabulary and runners grow"


def run(folder: Path, quick: bool) -> Record:
    """Runs every point in separate processes."""
    size = "test" if quick else "5M"
    base: dict[str, Any] = read_preset("imdb-tiny-paper") | {"model": make_model(size, folder), "eval_every": 10**6}
    record = Record("scaling", CLAIM, base)
    points: dict[str, dict[str, Any]] = {"as shipped: batch 128, 12 tokens, vocabulary 4,096": {}}
    if quick:
        points = {"batch 8": {"queries_per_update": 8, "minibatch_size": 8}}
    else:
        points |= {f"batch {n}": {"queries_per_update": n} for n in (64, 256, 512)}
        points |= {
            f"{n} response tokens": {"max_response_tokens": n, "max_prompt_tokens": 64 + n} for n in (24, 48, 96)
        }
        points["vocabulary 50,257"] = {"model": make_model("5M-50k", folder)}
        points["2 runners"] = {"num_runners": 2}
    measure(record, points)
    return record


def measure(record: Record, points: Mapping[str, dict[str, Any]], updates: int = 3) -> None:
    """Adds the time and memory of an update, after one that does not count, at every point.

    Args:
        record: whose settings all points share.
        points: changes by label.
        updates: how many are measured; a figure is their median.
    """
    for label, changes in points.items():
        took = run_side(
            "benchmarks.cory_side", {"settings": record.settings | changes, "warm_up": 1, "updates": updates}
        )
        record.figures += [
            Figure(f"{label}: an update", statistics.median(took.wall), "s"),
            *(
                Figure(f"{label}: {phase}", statistics.median(one[phase] for one in took.phases), "s")
                for phase in ("rollout", "reward", "learn", "sync")
            ),
            Figure(f"{label}: CPU", statistics.median(took.cpu), "CPU-s"),
            Figure(f"{label}: response tokens", statistics.median(took.tokens)),
            Figure(f"{label}: peak memory", took.peak_mb, "MB"),
            *(
                Figure(f"{label}: of it {process}", peak, "MB")
                for process, peak in took.peak_mb_by_process.items()
                if process in ("driver", "runner")
            ),
        ]
        record.detail[label] = vars(took)
