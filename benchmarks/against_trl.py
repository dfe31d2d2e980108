"""One update of CORY against the same work in a plain loop around two classic `PPOTrainer`s of trl 0.11.4."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks.models import make_model
from benchmarks.record import Figure, Record, median
from benchmarks.side import Took, need_package, run_side
from launch.console.configuration import read_preset

CLAIM = "one update against two PPOTrainers: ≥ 3 × faster in bf16, ≥ 1.5 × in fp32, peak memory ≤ 0.7 ×"
TRL = Path(os.environ.get("CORY_BENCHMARK_TRL", Path(__file__).parent / ".trl"))
THREADS = "2"  # intra-op threads of every process, on the same two cores
TARGETS = {"bf16": 3.0, "fp32": 1.5}


def run(folder: Path, quick: bool) -> Record:
    """Measures model sizes × batches; the sides take turns, each time in new processes.

    Raises:
        BenchmarkError: trl is not there.
    """
    need_package(TRL, "trl", "trl 0.11.4", f"-r {Path(__file__).parent / 'requirements-trl.txt'}")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(THREADS)])
    values: dict[str, Any] = read_preset("imdb-tiny-paper") | {"eval_every": 10**6}
    record = Record("against_trl", CLAIM, values)
    tiny = values | {"model": make_model("test", folder), "queries_per_update": 8, "minibatch_size": 8}
    libraries = compare(record, tiny, "tiny model, batch 8", 1, 1)
    for size, updates, rounds in [] if quick else [("5M", 2, 2), ("50M", 1, 1)]:
        for batch in (64, 256):
            settings = values | {"model": make_model(size, folder), "queries_per_update": batch, "minibatch_size": 64}
            label = f"{size}, batch {batch}"
            peaks = compare(record, settings, label, updates, rounds)
            beyond_libraries = {side: peak - libraries[side] for side, peak in peaks.items()}
            for dtype in TARGETS:
                label_text = f"{label}: peak memory beyond the tiny run's in {dtype}"
                record.figures.append(Figure(label_text, beyond_libraries[dtype] / beyond_libraries["trl"], "×"))
    return record


def compare(record: Record, settings: dict[str, Any], label: str, updates: int, rounds: int) -> dict[str, float]:
    """Adds the figures of one model and batch, and returns the peak memory of each side in MB.

    trl computes in fp32, its default, and both of our compute types are compared with that. In the first update of a
    process memory is touched for the first time, so one update is not counted.
    """
    took: dict[str, list[Took]] = {"trl": [], "bf16": [], "fp32": []}
    for _ in range(rounds):
        for side, turns in took.items():
            work = {"settings": settings, "warm_up": 1, "updates": updates}
            if side == "trl":
                paths = f"{TRL}{os.pathsep}{os.environ.get('PYTHONPATH', os.getcwd())}"
                turns.append(run_side("benchmarks.trl_side", work, OMP_NUM_THREADS=THREADS, PYTHONPATH=paths))
            else:
                work["settings"] = settings | {"dtype": side}
                turns.append(run_side("benchmarks.cory_side", work, OMP_NUM_THREADS=THREADS))
    for dtype, target in TARGETS.items():
        pairs = list(zip(took["trl"], took[dtype], strict=True))
        for clock, targets in (("wall", {"at_least": target}), ("cpu", {})):
            ratios = [per_token(theirs, clock) / per_token(ours, clock) for theirs, ours in pairs]
            record.figures.append(median(f"{label}: faster in {dtype}, {clock} time", ratios, "×", **targets))
        memory = [ours.peak_mb / theirs.peak_mb for theirs, ours in pairs]
        record.figures.append(median(f"{label}: peak memory in {dtype}", memory, "×", at_most=0.7))
        memory = [ours.peak_mb_with_daemons / theirs.peak_mb for theirs, ours in pairs]
        record.figures.append(median(f"{label}: the same with Ray's daemons", memory, "×"))
    for side, turns in took.items():
        seconds = [second for one in turns for second in one.wall]
        record.figures.append(median(f"{label}: an update, {side}", seconds, "s"))
        record.figures.append(Figure(f"{label}: peak memory, {side}", max(one.peak_mb for one in turns), "MB"))
        record.detail.setdefault(label, {})[side] = [vars(one) for one in turns]
    return {side: max(one.peak_mb for one in turns) for side, turns in took.items()}


def per_token(took: Took, clock: str) -> float:
    """Seconds per response token: a response that ends early is no gain."""
    return sum(getattr(took, clock)) / sum(took.tokens)
