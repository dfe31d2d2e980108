"""`cory runs` on recorded runs: which there are, and how each stands."""

import json
import time
from pathlib import Path

import pytest

from launch.report.listing import ListedRun, list_runs
from launch.run_folder.layout import LEASE
from launch.run_folder.run import Run
from policies.settings.settings import Settings
from tests.launch.conftest import Cory, record

SETTINGS = Settings(num_updates=12)


def made(folder: Path, done: int = 3, saved: int | None = None, **changes: object) -> Run:
    """A run that nothing trains, with a checkpoint if it has saved one."""
    run = record(folder, SETTINGS.model_copy(update=changes), updates=range(done + 1))
    if saved is not None:
        run.checkpoints.save(saved, lambda place: (place / "weights").touch())
    run.unlock()
    return run


def found(place: Path) -> dict[str, ListedRun]:
    return {Path(each.run).relative_to(place).as_posix(): each for each in list_runs(str(place))}


def test_each_run_is_listed_once_however_deep_and_says_how_it_stands(tmp_path: Path) -> None:
    made(tmp_path / "ended", done=12)
    made(tmp_path / "stopped", saved=3)
    made(tmp_path / "crashed", saved=2)
    made(tmp_path / "loading", done=-1)
    made(tmp_path / "diverged").path.joinpath("refused_update_000004_llm_1.safetensors").touch()
    collapsed = made(tmp_path / "study" / "runs" / "arm" / "seed_0", done=4, stop_on_collapse=True)
    collapsed.metrics.append({**collapsed.updates()[-1], "update": 5, "collapsed": True})
    copy = tmp_path / "ended" / "wandb" / "config.yaml"  # a run's own files are no runs, whatever they are called
    copy.parent.mkdir()
    copy.write_bytes((tmp_path / "ended" / "config.yaml").read_bytes())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").write_text("a: 1\n")
    made(tmp_path / "broken").path.joinpath("metrics.jsonl").write_text("no JSON\n")
    training = record(tmp_path / "training", SETTINGS, updates=range(7))

    runs = found(tmp_path)
    assert {name: each.state for name, each in runs.items()} == {
        **{state: state for state in ("ended", "stopped", "crashed", "diverged", "training")},
        "loading": "crashed",  # it was killed before there was anything to go on from
        "study/runs/arm/seed_0": "collapsed",
        "broken": "unreadable",
    }
    last = runs["training"]
    assert (last.update, last.updates, last.best_update, last.task) == (6, 12, 6, "imdb")
    assert last.best == pytest.approx(training.updates()[6]["evaluation"]["mean"]["combined_reward"])
    assert last.process == (training.path / ".lock").read_text()
    assert "metrics.jsonl line 1" in (runs["broken"].problem or "")
    assert found(tmp_path / "study") and list_runs(str(tmp_path / "ended"))[0].update == 12


@pytest.mark.parametrize(("age", "state"), [(5, "training"), (300, "crashed"), (None, "crashed")])
def test_a_run_in_storage_is_trained_as_long_as_its_lease_is_renewed(
    tmp_path: Path, age: float | None, state: str
) -> None:
    made(tmp_path / "one")
    if age is not None:
        lease = {"writer": "a", "host": "elsewhere", "process": 7, "time": time.time() - age}
        (tmp_path / "one" / LEASE).write_text(json.dumps(lease))
    for place in (f"file://{tmp_path}", str(tmp_path)):
        (run,) = list_runs(place)
        assert (run.state, run.process) == (state, "7 on elsewhere" if state == "training" else None)


def test_the_terminal_and_programs_are_told_the_same(cory_here: Cory, tmp_path: Path) -> None:
    made(tmp_path / "runs" / ("a-long-name-" * 12), saved=3)
    made(tmp_path / "runs" / "broken").path.joinpath("metrics.jsonl").write_text("no JSON\n")
    shown = cory_here("runs")
    assert shown.returncode == 0 and shown.stderr.startswith("Warning: ")
    (row,) = [line for line in shown.stdout.splitlines() if "a-long-name" in line]
    assert row.split()[:4] == [f"runs/{'a-long-name-' * 12}", "stopped", "imdb", "3/12"]
    assert row.split()[-2:] == time.strftime("%Y-%m-%d %H:%M").split()
    told = json.loads(cory_here("runs", "--json").stdout)
    assert [each["state"] for each in told] == ["unreadable", "stopped"]


def test_a_folder_without_runs_is_told_and_one_that_is_not_there_refused(cory_here: Cory) -> None:
    assert cory_here("runs", ".").stderr == "No runs found in ..\n"
    assert cory_here("runs").stderr == "No runs found in runs.\n"
    assert json.loads(cory_here("runs", "--json").stdout) == []
    missing = cory_here("runs", "nothing")
    assert missing.returncode == 2 and "nothing does not exist. Name a folder of runs." in missing.stderr
