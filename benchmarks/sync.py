"""Weight syncs from a learner to an engine: through Ray and shared memory, and by weight transfer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import ray

from benchmarks.models import make_model
from benchmarks.record import Figure, Record, median
from launch.console.configuration import read_preset
from policies.cory import CoryConfig

CLAIM = "which way new weights reach an engine sooner on one machine"
ROUNDS = 7


def run(folder: Path, quick: bool) -> Record:
    """Measures one LLM of each size over one and two learners; the first time of each, which makes groups, is apart."""
    values: dict[str, Any] = read_preset("imdb-tiny-ppo") | {
        "num_runners": 1,
        "dtype": "fp32",
        "check_weight_sync": False,
    }
    record = Record("sync", CLAIM, values)
    for size in ["test"] if quick else ["5M", "50M", "135M"]:
        model = make_model(size, folder)
        for learners in (1, 2):
            placement = {"model": model, "num_learners": learners, "shards_per_policy": learners}
            for transfer in (None, "gloo"):
                ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
                record.figures += measure({**values, **placement, "weight_transfer": transfer}, size)
                ray.shutdown()
    return record


def measure(settings: dict[str, Any], size: str) -> list[Figure]:
    """Seconds until the engine has the learner's weights, verified."""
    algorithm = CoryConfig().cory(**settings).build_algo()
    seconds = []
    for version in range(1, ROUNDS + 2):
        started = time.perf_counter()
        algorithm.runners.sync_weights(version)
        seconds.append(time.perf_counter() - started)
    algorithm.stop()
    learners = settings["num_learners"]
    name = f"{size}, {learners} learner{'s' * (learners > 1)}, {settings['weight_transfer'] or 'shared memory'}"
    return [median(name, seconds[1:], "s")]
