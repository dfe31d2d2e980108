"""One LLM over several processes: memory, CPU time, and difference of the weights from those of one process.

Each rank is a process that measures itself. What it had before it built the LLM is taken off.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from benchmarks.learner import build, learn, play
from benchmarks.models import make_model
from benchmarks.record import Figure, Record
from policies.learning.policy_learner import PolicyLearner
from policies.learning.policy_model import PolicyModel
from policies.learning.sharding import learner_mesh
from policies.models.language_model import meta_model
from policies.models.model_names import BUNDLED_LM
from policies.settings import memory
from policies.settings.files import read_preset
from policies.settings.settings import make_settings

CLAIM = "a rank rests at ≤ 1.1 × its share of the state, and ends within 5e-5 of one process"
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
"""Has glibc give back what a block took while it was whole; by default it keeps much of it."""
AT_REST = ("weights", "reference", "base and reference", "adapters", "Adam")


class RankMeasurement(NamedTuple):
    """Measurements of one rank."""

    rest: float
    """Bytes, after an update."""
    peak: float
    cpu: float
    """CPU seconds of the last update."""
    weights: Mapping[str, np.ndarray]
    """Of the first rank; the others have none."""


def run(folder: Path, quick: bool) -> Record:
    """Measures a random model of SmolLM2-135M's shape, with full weights and with adapters."""
    settings: dict[str, Any] = {
        **read_preset("paper"),
        **{"task": "imdb"},
        **{"model": make_model("test" if quick else "135M", folder), "num_agents": 1, "dtype": "fp32", "lr": 1e-4},
        **{"queries_per_update": 16, "minibatch_size": 16, "micro_batch_size": 4, "num_epochs": 1},
        **{"max_prompt_tokens": 32, "max_response_tokens": 32, "reward": "benchmarks.no_reward:zero"},
    }
    os.environ |= RETURNED  # to the processes that are started
    record = Record("sharding", CLAIM, settings | RETURNED)
    for weights in ("full", "lora"):
        baseline = start(settings | {"weights": weights}, 1, folder)
        for ranks in (1, 2) if quick else (1, 2, 4):
            of_ranks = settings | {"weights": weights, "shards_per_policy": ranks, "num_learners": ranks}
            measured = start(of_ranks, ranks, folder) if ranks > 1 else baseline
            record.figures += compare(f"{weights}, {ranks} ranks", of_ranks, baseline[0], measured)
    return record


def compare(
    how: str, settings: dict[str, Any], baseline: RankMeasurement, measured: list[RankMeasurement]
) -> list[Figure]:
    """The worst rank against the plan's estimate, and all of them against one process alone."""
    s = make_settings(settings)
    parts = memory.estimate_learner(s, memory.model_shapes(s)).parts
    share = sum(size for name, size in parts.items() if name in AT_REST)
    planned = sum(size for name, size in parts.items() if name not in ("libraries", "allowance"))
    rest, peak = max(rank.rest for rank in measured), max(rank.peak for rank in measured)
    difference = max(abs(array - measured[0].weights[name]).max() for name, array in baseline.weights.items())
    return [
        Figure(f"{how}: at rest", rest / 1e6, "MB"),
        Figure(f"{how}: at rest, of its share of the state", rest / share, "×", at_most=1.1),
        Figure(f"{how}: peak", peak / 1e6, "MB"),
        Figure(f"{how}: peak, of the plan's without its allowance", peak / planned, "×"),
        Figure(f"{how}: CPU time of all, of one alone", sum(rank.cpu for rank in measured) / baseline.cpu, "×"),
        Figure(f"{how}: largest difference of a weight", float(difference), at_most=5e-5),
    ]


def start(settings: dict[str, Any], ranks: int, folder: Path) -> list[RankMeasurement]:
    """Runs the ranks and returns their measurements in order.

    Raises:
        RuntimeError: one of them failed.
    """
    store = folder / f"store {time.monotonic_ns()}"
    pipes, processes = [], []
    for number in range(ranks):
        ours, theirs = get_context("spawn").Pipe()
        process = get_context("spawn").Process(target=rank, args=(number, ranks, settings, str(store), theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return [pipe.recv() for pipe in pipes]
    except EOFError as error:
        raise RuntimeError(f"A rank of {ranks} failed; what it said is above.") from error
    finally:
        for process in processes:
            process.join()


def rank(number: int, ranks: int, settings: dict[str, Any], store: str, answer: Connection) -> None:
    """Learns two updates as one of several ranks."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=ranks)
    s = make_settings(settings)
    rows = play(s)[0]
    warm_up(settings)
    dist.barrier()
    before = _resident()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    model = PolicyModel(
        s.model_paths["llm_1"],
        critic=s.critic,
        dtype=s.dtype,
        lora=s.lora,
        mesh=learner_mesh(1, ranks, "cpu")["shard"] if ranks > 1 else None,
    )
    learner = PolicyLearner(model, s.hyperparameters, name="llm_1")
    for update in range(2):
        began = time.process_time()
        learn({"llm_1": learner}, rows, s, update)
        cpu = time.process_time() - began
    learner.optimizer.zero_grad(set_to_none=True)
    peak = _status("VmHWM") - before
    rest = _resident() - before
    answer.send(RankMeasurement(rest, peak, cpu, dict(learner.stream_weights())))
    dist.destroy_process_group()


def warm_up(settings: dict[str, Any]) -> None:
    """Loads what comes with the first model of a process, and is none of its memory."""
    meta_model(make_settings(settings).model_paths["llm_1"])
    baseline = {"model": BUNDLED_LM, "shards_per_policy": None, "num_learners": 0}
    s = make_settings(settings | baseline)
    learn(build(s), play(s)[0], s, 0)


def _resident() -> int:
    """Returns the bytes that this process has in memory, once what it freed is given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return _status("VmRSS")


def _status(name: str) -> int:
    """Returns an entry of Linux's account of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
