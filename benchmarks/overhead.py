"""CPU time of an update by purpose; the rest is overhead of RLlib and our code."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch

from benchmarks.models import make_model
from benchmarks.processes import DAEMONS, cpu_seconds
from benchmarks.record import Figure, Record
from launch.console.configuration import read_preset
from policies.cory import Cory, CoryConfig
from policies.generation.vllm_generator import VLLMGenerator
from policies.learning.policy_learner import PolicyLearner
from policies.learning.policy_model import PolicyModel
from policies.rollout.chain_runner import ChainRunner
from policies.rollout.runners import Runners

CLAIM = "CPU outside generation, forward, backward, optimizer, reward and sync ≤ 5 % of an update"
WARM_UP = 2
IDLE_SECONDS = 5.0  # how long nothing is done, to see what background threads take


class Meter:
    """CPU seconds of this process inside the functions that it wraps; a wrapped call within another counts once."""

    def __init__(self) -> None:
        """Starts with no phases."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._busy = False

    def wrap(self, owner: Any, name: str, phase: str) -> None:
        """Counts every call of `owner.name` as `phase` from now on."""
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def metered(*args: Any, **kwargs: Any) -> Any:
            if self._busy:
                return original(*args, **kwargs)
            self._busy, started = True, time.process_time()
            try:
                return original(*args, **kwargs)
            finally:
                self._busy = False
                self.seconds[phase] += time.process_time() - started

        setattr(owner, name, metered)


METER = Meter()
"""One per process: the driver's, and in a runner the runner's."""


def run(folder: Path, quick: bool) -> Record:
    """Measures the preset imdb-tiny-paper as it is shipped, and a model ten times as large."""
    values: dict[str, Any] = read_preset("imdb-tiny-paper") | {
        "num_runners": 1,  # separate from the learner, to measure its work
        "eval_every": 10**6,
        "check_weight_sync": False,
    }
    record = Record("overhead", CLAIM, values)
    meter_driver()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    if quick:
        values |= {"model": make_model("test", folder), "queries_per_update": 8, "minibatch_size": 8}
        measure(record, "test", values, updates=1)
    else:
        measure(record, "imdb-tiny-paper", values, updates=10)
        measure(record, "50M", values | {"model": make_model("50M", folder)}, updates=3)
    ray.shutdown()
    return record


def measure(record: Record, label: str, values: dict[str, Any], updates: int) -> None:
    """Adds one run's figures and its whole account to the record."""
    algorithm = CoryConfig().cory(**values).build_algo()
    on_runner(algorithm, meter_runner)
    for _ in range(WARM_UP):
        algorithm.train()
    before, started = account(algorithm), time.perf_counter()
    for _ in range(updates):
        algorithm.train()
    after = account(algorithm)
    wall = (time.perf_counter() - started) / updates
    time.sleep(IDLE_SECONDS)
    idle = account(algorithm)
    algorithm.stop()
    spent = {name: (seconds - before.get(name, 0.0)) / updates for name, seconds in after.items()}
    daemons = spent.pop(DAEMONS, 0.0)
    total_seconds = sum(spent.values())
    rest = spent["driver: rest"] + spent["runner: rest"]
    idle_threads = spent["runner: vLLM's waiting threads"]
    record.figures += [
        Figure(f"{label}: RLlib and our glue", 100 * rest / total_seconds, "% of CPU time", at_most=5.0),
        Figure(
            f"{label}: the same with vLLM's waiting threads",
            100 * (rest + idle_threads) / total_seconds,
            "% of CPU time",
        ),
        Figure(
            f"{label}: the same with Ray's daemons", 100 * (rest + daemons) / (total_seconds + daemons), "% of CPU time"
        ),
        Figure(f"{label}: an update", total_seconds, "CPU-s"),
    ]
    record.detail[label] = {
        "cpu_seconds_per_update": {**spent, DAEMONS: daemons},
        "wall_seconds_per_update": wall,
        "idle_cpu_share": {name: (seconds - after[name]) / IDLE_SECONDS for name, seconds in idle.items()},
        "updates": updates,
    }


def account(algorithm: Cory) -> dict[str, float]:
    """CPU seconds so far: by `process: phase`, the rest of each process, and Ray's daemons."""
    total_seconds = cpu_seconds()
    phases = {
        "driver": dict(METER.seconds),
        "runner": on_runner(algorithm, read_meter),
    }
    spent = {
        f"{process}: {phase}": seconds
        for process, seconds_by_phase in phases.items()
        for phase, seconds in seconds_by_phase.items()
    }
    for process, seconds_by_phase in phases.items():
        spent[f"{process}: rest"] = total_seconds[process] - sum(seconds_by_phase.values())
    return spent | {"reward": total_seconds.get("reward", 0.0), DAEMONS: total_seconds.get(DAEMONS, 0.0)}


def on_runner(algorithm: Cory, function: Callable[[ChainRunner], Any]) -> Any:
    """What a function returns in the runner's process."""
    assert algorithm.env_runner_group is not None
    return algorithm.env_runner_group.foreach_env_runner(function, local_env_runner=False)[0]


def read_meter(runner: ChainRunner) -> dict[str, float]:
    """The phases of the process that this is called in, and what the threads took that vLLM's process groups wait with.

    Each wakes up a hundred times a second, also while the learner works.
    """
    waiting = 0.0
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("gloo"):
            waiting += int((task / "schedstat").read_text().split()[0]) / 1e9
    return {**METER.seconds, "vLLM's waiting threads": waiting}


def meter_driver() -> None:
    """Wraps the learner's arithmetic and the weight sync."""
    METER.wrap(PolicyModel, "score", "forward")
    METER.wrap(PolicyModel, "forward", "forward")
    METER.wrap(torch.Tensor, "backward", "backward")
    METER.wrap(PolicyLearner, "_clip_gradients", "optimizer")
    METER.wrap(torch.optim.Adam, "step", "optimizer")
    METER.wrap(Runners, "sync_weights", "sync")


def meter_runner(runner: ChainRunner) -> None:
    """Wraps vLLM's own call and the loading of weights."""
    assert isinstance(runner.generator, VLLMGenerator)
    for engine in runner.generator.engines.values():
        METER.wrap(engine, "enqueue", "generation")
        METER.wrap(engine.llm_engine, "step", "generation")
    METER.wrap(runner.generator, "load", "sync")
