"""One engine per LLM, against one engine that takes the weights of each in turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.models import SHAPES, make_model
from benchmarks.record import Figure, Record, median
from benchmarks.side import run_side

CLAIM = "what a second engine costs in memory, and taking other weights instead in time"
PROMPT, RESPONSE = 24, 12


def run(folder: Path, quick: bool) -> Record:
    """Measures one and two engines of each size, each in a separate process."""
    settings: dict[str, Any] = {"prompts": 8 if quick else 128, "loads": 3 if quick else 7}
    record = Record("engines", CLAIM, settings)
    for size in ["test"] if quick else ["5M", "50M", "135M"]:
        request = settings | {"model": make_model(size, folder), "vocabulary": SHAPES[size].vocabulary}
        one, two = (run_side("benchmarks.engine_side", request | {"engines": engines}) for engines in (1, 2))
        record.figures += [
            Figure(f"{size}: peak memory, one engine", one.peak_mb, "MB"),
            Figure(f"{size}: peak memory, two engines", two.peak_mb, "MB"),
            median(f"{size}: new weights into an engine", one.wall, "s"),
            median(f"{size}: a batch of responses", [took["batch"] for took in one.phases], "s"),
        ]
    return record
