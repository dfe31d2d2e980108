"""Role exchange: its time at two model sizes, and a check that weights do not move."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import ray

from benchmarks.models import make_model
from benchmarks.record import Figure, Record, median
from launch.console.configuration import read_preset
from policies.cory import Cory, CoryConfig
from policies.models.weights import checksum
from policies.role_exchange import RoleExchange

CLAIM = "a role exchange takes ≤ 10 ms at any model size and moves no weight"
EXCHANGES = 200


def run(folder: Path, quick: bool) -> Record:
    """Measures both sizes; generation is left out, because the exchange does not reach it."""
    values: dict[str, Any] = read_preset("imdb-tiny-paper") | {
        "backend": "transformers",
        "num_runners": 0,
        "exchange_period": 1,
    }
    record = Record("role_exchange", CLAIM, values | {"check_weight_sync": False})
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    for size in ["test"] if quick else ["5M", "50M"]:
        settings = record.settings | {"model": make_model(size, folder)}
        record.figures += measure(CoryConfig().cory(**settings).build_algo(), size)
    ray.shutdown()
    return record


def measure(algorithm: Cory, size: str) -> list[Figure]:
    """Exchanges roles many times through the callback, as after an update."""
    before = _weights(algorithm)
    milliseconds = []
    for _ in range(EXCHANGES):
        algorithm.updates_since_exchange = 1  # as if an update had passed
        result: dict[str, Any] = {"cory": {}}
        started = time.perf_counter()
        RoleExchange().on_train_result(algorithm=algorithm, result=result)
        milliseconds.append(1000 * (time.perf_counter() - started))
        if not result["cory"]["exchanged"]:
            raise RuntimeError("The callback did not exchange the roles.")
    if _weights(algorithm) != before:
        raise RuntimeError("A role exchange changed a weight.")
    algorithm.stop()
    return [
        median(f"{size}: median", milliseconds, "ms", at_most=10.0),
        Figure(f"{size}: slowest of {EXCHANGES}", max(milliseconds), "ms", at_most=10.0),
    ]


def _weights(algorithm: Cory) -> list[int]:
    """Checksums of each LLM's weights in the learner."""
    return [checksum(algorithm.weights(policy_id)) for policy_id in algorithm.settings.policy_ids]
