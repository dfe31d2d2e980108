"""Finding the files of a run, and importing the modules of several runs' functions in one process."""

import os
import sys
from pathlib import Path

import pytest

from cory_env.home import IN_JOB
from cory_env.rewarding.worker import RewardWorker
from launch.console.errors import CommandError
from launch.run_folder.locations import add_module_folders, locate_files, module_file
from tests.paper import paper_settings

REWARD = "of_a_run:value"


def folder_with_reward(folder: Path, value: int) -> dict[str, str]:
    folder.mkdir()
    file = folder / "of_a_run.py"
    file.write_text(f"def value(completions):\n    return [{value}.0] * len(completions)\n")
    return {REWARD: str(file)}


def score() -> list[float | None]:
    with RewardWorker(REWARD, timeout=30) as worker:
        return worker.rewards(["q"], ["c"], {})


@pytest.mark.parametrize(("present", "value"), [("empty", 1.0), ("here", 3.0)])
def test_a_run_s_module_is_imported_from_its_recorded_folder_unless_the_working_directory_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, present: str, value: float
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    run = folder_with_reward(tmp_path / "run", 1)
    folder_with_reward(tmp_path / "here", 3)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / present)
    assert (module_file(REWARD) is None) == (present == "empty")
    add_module_folders([REWARD], run)
    assert score() == [value]


def test_the_latest_run_s_module_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.chdir(tmp_path)
    first, second = (folder_with_reward(tmp_path / f"run_{value}", value) for value in (1, 2))
    for paths, value in ((first, 1.0), (second, 2.0), (first, 1.0)):
        add_module_folders([REWARD], paths)
        assert score() == [value]


def test_data_that_a_continued_run_s_job_lacks_may_have_been_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = paper_settings(task="custom", data="q.csv", reward=REWARD)
    paths = {"q.csv": str(tmp_path / "first_job" / "q.csv")}
    message = rf"q\.csv is no longer in {tmp_path}/first_job, where .* in a folder that has it\."
    with pytest.raises(CommandError, match=f"{message}$"):
        locate_files(settings, paths)
    monkeypatch.setenv(IN_JOB, "{}")
    with pytest.raises(CommandError, match=rf"{message} A Ray job has only the files .* in \.gitignore and"):
        locate_files(settings, paths)
