"""EleutherAI's lm-evaluation-harness on the policies of a run and the untouched base, in one table.

Each model's results are a line of `results.jsonl`, from which a killed evaluation goes on at the next one.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import numpy as np
import torch

from launch.console.errors import CommandError
from launch.display.tables import table
from launch.display.terminal import Voice
from launch.evaluation.batches import Batches
from launch.models.export import write
from launch.models.trained import Trained
from policies.models.model_names import model_path

if TYPE_CHECKING:
    from rich.table import Table

BASE = "base"
BATCH = 16
ARROWS: dict[bool | None, str] = {True: "↑", False: "↓", None: ""}
"""By whether higher is better."""


class Wanted(NamedTuple):
    """What is measured."""

    tasks: tuple[str, ...]
    folder: Path | None
    """With task files (YAML) beside those that the harness brings."""
    limit: int | None
    """Only so many documents of each task."""

    def identity(self, trained: Trained) -> dict[str, Any]:
        """All that the results depend on, as JSON."""
        files = sorted(self.folder.rglob("*")) if self.folder is not None else []
        return {
            "tasks": self.tasks,
            "files": [(str(file), zlib.crc32(file.read_bytes())) for file in files if file.is_file()],
            "limit": self.limit,
            "models": trained.settings.models,
            "update": trained.lines[-1],
            "version": importlib.metadata.version("lm-eval"),
        }

    def fingerprint(self, trained: Trained) -> str:
        """A short name of the identity."""
        return hashlib.sha256(json.dumps(self.identity(trained), sort_keys=True).encode()).hexdigest()[:8]


def check_installed() -> None:
    """Refuses to begin without the harness.

    Raises:
        CommandError: says how to install it.
    """
    try:
        importlib.metadata.version("lm-eval")
    except importlib.metadata.PackageNotFoundError as error:
        raise CommandError("--lm-eval needs the package lm-eval. Run `pip install 'lm-eval>=0.4.13'`.") from error


def measure(trained: Trained, wanted: Wanted, out: Path, console: TextIO, quiet: bool) -> dict[str, dict[str, Any]]:
    """Measures the base and every policy, each as `cory export` writes it, with an adapter merged into its base.

    Args:
        trained: whose the policies are.
        wanted: what is measured.
        out: the evaluation's folder; it may have results of some models.
        console: shows which model is next.
        quiet: show nothing.

    Returns:
        By model what the harness says: `results` (by task the metrics and their standard errors), versions and so on.

    Raises:
        CommandError: there is no such task, the base is quantised, or the folder has results of something else.
    """
    if trained.settings.quantization != "none":
        raise CommandError(
            f"The adapters were trained on a base in {trained.settings.quantization}, so they cannot be merged into a "
            "model for the harness."
        )
    if not wanted.tasks:
        raise CommandError("--lm-eval names no task. `lm-eval ls tasks` lists those of the harness.")
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if wanted.folder is None else str(wanted.folder))
    if unknown := [task for task in wanted.tasks if not manager.match_tasks([task])]:
        raise CommandError(
            f"The harness knows no task {', '.join(unknown)}. `lm-eval ls tasks` lists its own; "
            "--lm-eval-tasks-folder names a folder with others."
        )
    bases = dict.fromkeys(trained.settings.models.values())
    called = {BASE if len(bases) == 1 else f"{BASE} {name}": name for name in bases}
    batches = Batches(out / "results.jsonl", wanted.identity(trained), (*called, *trained.settings.modules))

    def run(label: str) -> dict[str, object]:
        voice.stage(f"Measuring {label}")
        with tempfile.TemporaryDirectory(prefix="cory-export-") as folder:
            path = model_path(called[label]) if label in called else str(Path(folder) / "model")
            if label not in called:
                write(trained, label, Path(path), "fp32", merge=trained.settings.lora is not None)
            results = _run(path, trained.settings.trust_remote_code, wanted, manager)
        return {"model": label, **json.loads(json.dumps(results, default=_plain))}

    with Voice(console, len(batches.work), done=batches.done, quiet=quiet, bar=False) as voice:
        batches.run(run, voice)
    return {results["model"]: results for results in batches.results}


def _plain(value: object) -> object:
    """Returns what JSON has for a value of another kind."""
    return value.item() if isinstance(value, np.generic) else str(value)


def _run(path: str, trust_remote_code: bool, wanted: Wanted, manager: Any) -> dict[str, Any]:
    import lm_eval

    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": path, "dtype": "float32", "trust_remote_code": trust_remote_code},
        tasks=list(wanted.tasks),
        task_manager=manager,
        limit=wanted.limit,
        batch_size=BATCH,
        device="cuda" if torch.cuda.is_available() else "cpu",
        log_samples=False,
    )
    kept = ("results", "versions", "n-shot", "n-samples", "higher_is_better", "configs")
    return {name: results[name] for name in kept if name in results}


class Row(NamedTuple):
    """A metric of a task."""

    task: str
    documents: str
    """How many were asked, and of how many; empty for a group of tasks."""
    metric: str
    values: dict[str, tuple[float, float | None]]
    """By model, and its standard error (None: the harness gives none)."""


def rows(found: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Returns a row per task and metric that is a number for all models."""
    made = []
    first = next(iter(found.values()))
    for task, metrics in first["results"].items():
        asked = first.get("n-samples", {}).get(task, {})
        documents = " of ".join(str(asked[name]) for name in ("effective", "original") if name in asked)
        better = first.get("higher_is_better", {}).get(task) or {}
        for name in metrics:
            metric, _, filtered = name.partition(",")
            if not filtered or metric.endswith("_stderr"):
                continue
            values = {}
            for label, each in found.items():
                value, error = (each["results"][task].get(f"{metric}{part},{filtered}") for part in ("", "_stderr"))
                if isinstance(value, int | float):
                    values[label] = (value, error if isinstance(error, int | float) else None)
            if len(values) == len(found):
                shown_metric = metric if filtered == "none" else f"{metric} ({filtered})"
                made.append(Row(task, documents, f"{shown_metric} {ARROWS[better.get(metric)]}".strip(), values))
    return made


def shown(found: Mapping[str, Mapping[str, Any]]) -> Table:
    """Returns the table of all models: value ± standard error; an arrow says where better is."""
    made = table(["task", "documents", "metric"], list(found))
    for row in rows(found):
        cells = [f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}") for value, error in row.values.values()]
        made.add_row(row.task, row.documents, row.metric, *cells)
    return made


def tasks_of(words: str) -> tuple[str, ...]:
    """Returns the names in `a,b`."""
    return tuple(word.strip() for word in words.split(",") if word.strip())
