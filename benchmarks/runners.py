"""Rollout throughput over one, two and three runners, each on a separate node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.long_run import short_folder
from benchmarks.models import make_model
from benchmarks.nodes import Nodes
from benchmarks.record import Figure, Record, median
from benchmarks.side import run_side
from launch.console.configuration import read_preset

CLAIM = "rollouts get faster with every runner on a node of its own, as far as the machine has cores for them"


def run(folder: Path, quick: bool) -> Record:
    """One cluster per number of runners; the first update does not count."""
    size, queries, updates = ("test", 8, 2) if quick else ("5M", 384, 4)
    settings: dict[str, Any] = read_preset("imdb-tiny-paper") | {
        **{"model": make_model(size, folder), "queries_per_update": queries, "num_epochs": 1, "eval_every": 10**6},
        "minibatch_size": min(queries, 64),
    }
    record = Record("runners", CLAIM, settings)
    baseline = 0.0
    for runners in (1, 2, 3):
        with short_folder() as folder:
            nodes = Nodes(folder)
            try:
                for _ in range(runners):
                    nodes.add(1)  # so it has room for one runner
                work = {"settings": settings | {"num_runners": runners}, "warm_up": 1, "updates": updates}
                took = run_side("benchmarks.cory_side", work, RAY_ADDRESS=nodes.address)
            finally:
                nodes.close()
        speeds = [tokens / phases["rollout"] for tokens, phases in zip(took.tokens, took.phases, strict=True)]
        figure = median(f"{runners} runners: response tokens per second of the rollout", speeds, "1/s")
        baseline = baseline or figure.value
        record.figures += [figure, Figure(f"{runners} runners: times as fast as one", figure.value / baseline)]
        record.detail[f"{runners} runners"] = vars(took)
    return record
