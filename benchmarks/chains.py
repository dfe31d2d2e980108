"""How an update's time and memory grow with the agents of the chain, an adapter each on one base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.models import make_model
from benchmarks.record import Record
from benchmarks.scaling import measure
from launch.console.configuration import read_preset

CLAIM = "time and memory of an update as the chain grows, with weights=lora"
UNCUT = 200
"""Tokens that hold the prompts of eight agents whole, with all earlier responses."""


def run(folder: Path, quick: bool) -> Record:
    """Runs every point in separate processes."""
    size = "test" if quick else "5M"
    base: dict[str, Any] = read_preset("imdb-tiny-paper") | {
        "model": make_model(size, folder),
        "weights": "lora",
        "observed": "last",
        "queries_per_update": 8 if quick else 16,
        "minibatch_size": 8 if quick else 16,
        "eval_every": 10**6,
    }
    points: dict[str, dict[str, Any]] = {f"n = {n}": {"num_agents": n} for n in ((1, 4) if quick else (1, 2, 4, 8))}
    if not quick:
        points["n = 8, all observed"] = {"num_agents": 8, "observed": "all", "max_prompt_tokens": UNCUT}
    record = Record("chains", CLAIM, base)
    measure(record, points, updates=1 if quick else 2)
    return record
