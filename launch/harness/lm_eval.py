"""EleutherAI's lm-evaluation-harness on the policies of a run and the untouched base, in one table.

Each model's results lie in a file of their own, so a killed evaluation goes on at the next one.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from launch.console.errors import CommandError
from launch.display.tables import table
from launch.models.export import write
from launch.models.trained import Trained
from launch.run_folder.journal import replace_text
from policies.models.model_names import model_path

if TYPE_CHECKING:
    from rich.table import Table

BASE = "base"
BATCH = 16


class Wanted(NamedTuple):
    """What is measured."""

    tasks: tuple[str, ...]
    folder: Path | None
    """With task files (YAML) beside those that the harness brings."""
    limit: int | None
    """Only so many documents of each task."""

    def fingerprint(self, trained: Trained) -> str:
        """A short name of all that the results depend on."""
        files = sorted(self.folder.rglob("*")) if self.folder is not None else []
        seal = [(str(file), zlib.crc32(file.read_bytes())) for file in files if file.is_file()]
        version = importlib.metadata.version("lm-eval")
        identity = [self.tasks, seal, self.limit, trained.settings.models, trained.update, version]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]


def check_installed() -> None:
    """Refuses to begin without the harness.

    Raises:
        CommandError: says how to install it.
    """
    try:
        importlib.metadata.version("lm-eval")
    except importlib.metadata.PackageNotFoundError as error:
        raise CommandError("--lm-eval needs the package lm-eval. Run `pip install 'lm-eval>=0.4.13'`.") from error


def measure(trained: Trained, wanted: Wanted, out: Path, tell: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Measures the base and every policy, each as `cory export` writes it, with an adapter merged into its base.

    Args:
        trained: whose the policies are.
        wanted: what is measured.
        out: the evaluation's folder; it may have results of some models.
        tell: is told which model is next.

    Returns:
        By model the harness's `results`: by task the metrics and their standard errors.

    Raises:
        CommandError: there is no such task, or the base is quantised.
    """
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if wanted.folder is None else str(wanted.folder))
    if unknown := [task for task in wanted.tasks if not manager.match_tasks([task])]:
        raise CommandError(
            f"The harness knows no task {', '.join(unknown)}. `lm-eval ls tasks` lists its own; "
            "--lm-eval-tasks-folder names a folder with others."
        )
    found = {}
    bases = dict.fromkeys(trained.settings.models.values())
    called = {BASE if len(bases) == 1 else f"{BASE} {name}": name for name in bases}
    for label in (*called, *trained.settings.modules):
        file = out / f"{label.replace('/', '--')}.json"
        if not file.is_file():
            tell(label)
            with tempfile.TemporaryDirectory(prefix="cory-export-") as place:
                if label in called:
                    path = model_path(called[label])
                else:
                    path = str(Path(place) / "model")
                    write(trained, label, Path(path), "fp32", merge=trained.settings.lora is not None)
                results = _run(path, trained.settings.trust_remote_code, wanted, manager)
            replace_text(file, json.dumps(results, indent=1, default=str) + "\n")
        found[label] = json.loads(file.read_text(encoding="utf-8"))["results"]
    return found


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


def rows(found: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, dict[str, tuple[float, float | None]]]]:
    """Returns a row per task and metric: by model, its value and standard error (None: the harness gives none)."""
    made = []
    for task, metrics in next(iter(found.values())).items():
        for name in metrics:
            metric, _, filtered = name.partition(",")
            if not filtered or metric.endswith("_stderr"):
                continue
            values = {}
            for label, results in found.items():
                error = results[task].get(f"{metric}_stderr,{filtered}")
                values[label] = (results[task][name], error if isinstance(error, int | float) else None)
            made.append((task, metric if filtered == "none" else f"{metric} ({filtered})", values))
    return made


def shown(found: Mapping[str, Mapping[str, Any]]) -> Table:
    """Returns the table of all models: value ± standard error."""
    made = table(["task", "metric"], list(found))
    for task, metric, values in rows(found):
        cells = [f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}") for value, error in values.values()]
        made.add_row(task, metric, *cells)
    return made


def tasks_of(words: str) -> tuple[str, ...]:
    """Returns the names in `a,b`."""
    return tuple(word.strip() for word in words.split(",") if word.strip())
