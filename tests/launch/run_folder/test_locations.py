"""Finding the files of a run."""

from pathlib import Path

import pytest

from cory_env.home import IN_JOB
from launch.console.errors import CommandError
from launch.run_folder.locations import locate_files
from tests.paper import paper_settings


def test_data_that_a_continued_run_s_job_lacks_may_have_been_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = paper_settings(task="custom", data="q.csv", reward="mine:score")
    paths = {"q.csv": str(tmp_path / "first_job" / "q.csv")}
    message = rf"q\.csv is no longer in {tmp_path}/first_job, where .* in a folder that has it\."
    with pytest.raises(CommandError, match=f"{message}$"):
        locate_files(settings, paths)
    monkeypatch.setenv(IN_JOB, "{}")
    with pytest.raises(CommandError, match=rf"{message} A Ray job has only the files .* in \.gitignore and"):
        locate_files(settings, paths)
