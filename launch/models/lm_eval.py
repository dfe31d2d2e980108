"""Evaluates the policies of a run and their base model with EleutherAI's lm-evaluation-harness.

Each model's results are a line of `results.jsonl`; an interrupted evaluation continues with the next model.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import numpy as np
import torch

from launch.console.errors import CommandError
from launch.display.tables import new_table
from launch.display.terminal import ProgressPrinter
from launch.evaluation.batches import Batches
from launch.models.export import export_policy
from launch.models.trained import PolicySet
from policies.models.revision import split_revision

if TYPE_CHECKING:
    from rich.table import Table

BASE_LABEL = "base"
BATCH_SIZE = 16
DIRECTION_ARROWS: dict[bool | None, str] = {True: "↑", False: "↓", None: ""}
"""Whether higher is better, to the arrow in the table."""


class Suite(NamedTuple):
    """The tasks of an evaluation."""

    tasks: tuple[str, ...]
    folder: Path | None
    """Folder with additional task files (YAML)."""
    limit: int | None
    """Maximum number of documents per task."""

    def identity(self, trained: PolicySet) -> dict[str, Any]:
        """Returns everything that the results depend on, as JSON."""
        files = sorted(self.folder.rglob("*")) if self.folder is not None else []
        return {
            "tasks": self.tasks,
            "files": [(str(file), zlib.crc32(file.read_bytes())) for file in files if file.is_file()],
            "limit": self.limit,
            "models": trained.settings.models,
            **({"revisions": trained.settings.revisions} if trained.settings.model_revision else {}),
            "update": trained.metrics[-1],
        }

    def fingerprint(self, trained: PolicySet) -> str:
        """Returns a short hash of the identity."""
        digest = hashlib.sha256(json.dumps(self.identity(trained), sort_keys=True).encode()).hexdigest()
        return f"lm-eval-{digest[:8]}"


def run_lm_eval(trained: PolicySet, suite: Suite, out: Path, console: TextIO, quiet: bool) -> dict[str, dict[str, Any]]:
    """Evaluates the base model and every policy. Policies are exported first, with adapters merged.

    Args:
        trained: the policies.
        suite: the tasks.
        out: the evaluation's folder; it may contain results of some models.
        console: for progress messages.
        quiet: print no progress.

    Returns:
        Model label to the output of the harness: `results` (metrics and standard errors by task), versions, and more.

    Raises:
        CommandError: the harness is not installed, a task is unknown, the base is quantized, or the folder contains
            results of another evaluation.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        raise CommandError("--lm-eval requires the package lm-eval. Run `pip install 'lm-eval>=0.4.13'`.") from error
    manager = TaskManager(include_path=None if suite.folder is None else str(suite.folder))
    if unknown := [task for task in suite.tasks if not manager.match_tasks([task])]:
        raise CommandError(
            f"Unknown lm-eval task {', '.join(unknown)}. `lm-eval ls tasks` lists the built-in tasks; add your own "
            "with --lm-eval-tasks-folder."
        )
    models = dict(zip(trained.settings.models.values(), trained.settings.model_paths.values(), strict=True))
    bases = {BASE_LABEL if len(models) == 1 else f"{BASE_LABEL} {name}": path for name, path in models.items()}
    batches = Batches(out / "results.jsonl", suite.identity(trained), (*bases, *trained.settings.policy_ids))

    def run(label: str) -> dict[str, object]:
        progress.stage(f"Evaluating {label}")
        with tempfile.TemporaryDirectory(prefix="cory-export-") as folder:
            path = bases[label] if label in bases else str(Path(folder) / "model")
            if label not in bases:
                export_policy(trained, label, Path(path), merge=trained.settings.lora is not None)
            results = _run_harness(path, trained.settings.trust_remote_code, suite, manager)
        return {"model": label, **json.loads(json.dumps(results, default=_to_json_value))}

    with ProgressPrinter(console, len(batches.work), done=batches.done, quiet=quiet, bar=False) as progress:
        batches.run(run, progress)
    return {results["model"]: results for results in batches.results}


def _to_json_value(value: object) -> object:
    """Converts a value that JSON does not support."""
    return value.item() if isinstance(value, np.generic) else str(value)


def _run_harness(path: str, trust_remote_code: bool, suite: Suite, manager: Any) -> dict[str, Any]:
    import lm_eval

    hub_id, revision = split_revision(path)
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": hub_id, **revision, "dtype": "float32", "trust_remote_code": trust_remote_code},
        tasks=list(suite.tasks),
        task_manager=manager,
        limit=suite.limit,
        batch_size=BATCH_SIZE,
        device="cuda" if torch.cuda.is_available() else "cpu",
        log_samples=False,
    )
    keys = ("results", "versions", "n-shot", "n-samples", "higher_is_better", "configs")
    return {key: results[key] for key in keys if key in results}


def results_table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """Returns a table with a column per model, and a row per task and metric that is numeric for all models.

    Values include the standard error, if available. An arrow shows the direction of improvement.
    """
    rows = new_table(["task", "documents", "metric"], list(results))
    first = next(iter(results.values()))
    for task, metrics in first["results"].items():
        samples = first.get("n-samples", {}).get(task, {})
        documents = " of ".join(str(samples[name]) for name in ("effective", "original") if name in samples)
        higher_is_better = first.get("higher_is_better", {}).get(task) or {}
        for key in metrics:
            metric, _, filter_name = key.partition(",")
            values = [model["results"][task].get(key) for model in results.values()]
            errors = [model["results"][task].get(f"{metric}_stderr,{filter_name}") for model in results.values()]
            if metric.endswith("_stderr") or not all(isinstance(value, int | float) for value in values):
                continue
            arrow = DIRECTION_ARROWS[higher_is_better.get(metric)]
            name = f"{metric if filter_name == 'none' else f'{metric} ({filter_name})'} {arrow}"
            cells = [
                f"{value:.4f}" + (f" ± {error:.4f}" if isinstance(error, int | float) else "")
                for value, error in zip(values, errors, strict=True)
            ]
            rows.add_row(task, documents, name.strip(), *cells)
    return rows
