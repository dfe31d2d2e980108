"""Memory of a learner for models of five sizes, against `cory plan`'s estimate.

A process that learns measures itself, as in `sharding`. Rows are as long as they may be, as the estimate has them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks.adapters import equal_lengths
from benchmarks.models import make_model
from benchmarks.record import Figure, Record
from benchmarks.sharding import AT_REST, RETURNED, start
from policies.settings import memory
from policies.settings.files import read_preset
from policies.settings.settings import make_settings

CLAIM = "a learner's memory, at rest and at its peak, is within a third of the estimate"
SIZES = ("5M", "20M", "50M", "135M", "360M")


def run(folder: Path, quick: bool) -> Record:
    """Measures each size with full weights and adapters, in fp32 and bf16."""
    settings: dict[str, Any] = {
        **read_preset("paper"),
        **{
            "task": "imdb",
            "num_agents": 1,
            "lr": 1e-4,
            "queries_per_update": 16,
            "minibatch_size": 16,
            "micro_batch_size": 8,
            "num_epochs": 1,
        },
        **{
            "max_query_tokens": 64,
            "max_prompt_tokens": 64,
            "max_response_tokens": 64,
            "reward": "benchmarks.no_reward:zero",
        },
    } | equal_lengths(folder)
    os.environ |= RETURNED  # to the processes that are started
    record = Record("memory", CLAIM, settings | RETURNED)
    ratios = []
    for size in ("test",) if quick else SIZES:
        model = make_model(size, folder)
        for weights in ("full", "lora"):
            for dtype in ("fp32", "bf16"):
                of_one = settings | {"model": model, "weights": weights, "dtype": dtype}
                measured, need = start(of_one, 1, folder)[0], estimated(of_one)
                for when, size_bytes, planned in zip(
                    ("at rest", "peak"), (measured.rest, measured.peak), need, strict=True
                ):
                    how = f"{size} {weights} {dtype}: {when}"
                    ratios.append(size_bytes / planned)
                    record.figures += [
                        Figure(how, size_bytes / 1e6, "MB"),
                        Figure(f"{how}, of the estimate", ratios[-1], "×"),
                    ]
                    print(record.figures[-2], record.figures[-1].value, flush=True)
    record.figures.append(Figure("farthest from 1", max(abs(ratio - 1) for ratio in ratios), at_most=0.36))
    return record


def estimated(settings: dict[str, Any]) -> tuple[float, float]:
    """Bytes at rest and at the peak, by the plan's estimate, without libraries and allowance."""
    s = make_settings(settings)
    parts = memory.estimate_learner(s, memory.model_shapes(s)).parts
    peak = sum(size for name, size in parts.items() if name not in ("libraries", "allowance"))
    return sum(size for name, size in parts.items() if name in AT_REST), peak
