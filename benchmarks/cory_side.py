"""Updates of CORY as `cory train` runs them, in a separate process; see `benchmarks.side`."""

from __future__ import annotations

import os

import ray

from benchmarks.processes import watched_memory
from benchmarks.side import Took, read_work
from policies.cory import Cory, CoryConfig


def one_update(algorithm: Cory) -> tuple[int, dict[str, float]]:
    """One update; returns its response tokens and the seconds of its phases."""
    report = algorithm.train()["cory"]
    return report["tokens"], report["seconds"]


def main() -> None:
    """Builds the algorithm, runs the updates and answers."""
    work, took = read_work(), Took()
    with watched_memory() as peak:
        cpus = max(os.cpu_count() or 1, work["settings"]["num_runners"] * work["settings"].get("runner_threads", 1))
        if "RAY_ADDRESS" in os.environ:
            ray.init(log_to_driver=False)
        else:
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False)
        algorithm = CoryConfig().cory(**work["settings"]).build_algo()
        for _ in range(work["warm_up"]):
            one_update(algorithm)
    took.note_memory(peak)
    took.time_updates(lambda: one_update(algorithm), work["updates"])
    algorithm.stop()
    ray.shutdown()
    took.answer()


if __name__ == "__main__":
    main()
