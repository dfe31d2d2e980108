"""`cory runs` on recorded runs."""

import json
import time
from pathlib import Path

import pytest

from launch.commands.runs import list_runs
from launch.run_folder.run import Run
from launch.run_folder.status import RunStatus
from tests.launch.conftest import Cory, record_test_run
from tests.paper import paper_settings

SETTINGS = paper_settings(num_updates=12)


def record_run(folder: Path, done: int = 3, saved: int | None = None, **changes: object) -> Run:
    """Records a run that no process is training, with a checkpoint of update `saved`."""
    run = record_test_run(folder, SETTINGS.model_copy(update=changes), updates=range(done + 1))
    if saved is not None:
        run.checkpoints.save(saved, lambda checkpoint: (checkpoint / "weights").touch())
    run.unlock()
    return run


def runs_by_path(folder: Path) -> dict[str, RunStatus]:
    return {Path(run.run).relative_to(folder).as_posix(): run for run in list_runs(str(folder))}


def test_each_run_is_listed_once_with_its_state_at_any_depth(tmp_path: Path) -> None:
    record_run(tmp_path / "ended", done=12)
    record_run(tmp_path / "stopped", saved=3)
    record_run(tmp_path / "killed", saved=2)  # a killed process and a failed one have the same state
    record_run(tmp_path / "loading", done=-1)
    record_run(tmp_path / "diverged").path.joinpath("refused_update_000004_llm_1.safetensors").touch()
    record_run(tmp_path / "study" / "runs" / "arm" / "seed_0", saved=4)
    copy = tmp_path / "ended" / "wandb" / "config.yaml"  # files inside a run are not runs
    copy.parent.mkdir()
    copy.write_bytes((tmp_path / "ended" / "config.yaml").read_bytes())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").write_text("a: 1\n")
    record_run(tmp_path / "broken").path.joinpath("metrics.jsonl").write_text("no JSON\n")
    training = record_test_run(tmp_path / "training", SETTINGS, updates=range(7))

    runs = runs_by_path(tmp_path)
    assert {name: run.state for name, run in runs.items()} == {
        **{state: state for state in ("ended", "stopped", "diverged", "training")},
        "killed": "stopped",
        "loading": "stopped",  # killed before its first checkpoint
        "study/runs/arm/seed_0": "stopped",
        "broken": "unreadable",
    }
    last = runs["training"]
    assert (last.update, last.updates, last.best_update, last.task) == (6, 12, 6, "imdb")
    assert last.best == pytest.approx(training.metrics[6]["evaluation"]["mean"]["combined_reward"])
    assert last.process == (training.path / ".lock").read_text()
    assert "metrics.jsonl line 1" in (runs["broken"].problem or "")
    assert runs_by_path(tmp_path / "study") and list_runs(str(tmp_path / "ended"))[0].update == 12


def test_table_and_json_output_agree(cory_in_process: Cory, tmp_path: Path) -> None:
    record_run(tmp_path / "runs" / ("a-long-name-" * 12), saved=3)
    record_run(tmp_path / "runs" / "broken").path.joinpath("metrics.jsonl").write_text("no JSON\n")
    result = cory_in_process("runs")
    assert result.returncode == 0 and result.stderr.startswith("Warning: ")
    (row,) = [line for line in result.stdout.splitlines() if "a-long-name" in line]
    assert row.split()[:4] == [f"runs/{'a-long-name-' * 12}", "stopped", "imdb", "3/12"]
    assert row.split()[-2:] == time.strftime("%Y-%m-%d %H:%M").split()
    runs = json.loads(cory_in_process("runs", "--json").stdout)
    assert [run["state"] for run in runs] == ["unreadable", "stopped"]


def test_a_folder_without_runs_is_reported_and_a_missing_one_rejected(cory_in_process: Cory) -> None:
    assert cory_in_process("runs", ".").stderr == "No runs found in ..\n"
    assert cory_in_process("runs").stderr == "No runs found in runs.\n"
    assert json.loads(cory_in_process("runs", "--json").stdout) == []
    missing = cory_in_process("runs", "nothing")
    assert missing.returncode == 2 and "nothing does not exist. Pass a folder of runs." in missing.stderr
