"""Taking a run in storage over from a process that still trains it."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from launch.console.errors import CommandError
from launch.main import main
from launch.run_folder.run import Run
from launch.run_folder.storage import Storage, WriterChangedError
from launch.run_folder.stored_run import StoredRun
from launch.training.saving import CheckpointWriter
from launch.training.training import Trainer
from tests.launch.conftest import Cory, start_cory
from tests.launch.run_folder.conftest import SETTINGS, contents, end, on_another_machine, resume, stored_run
from tests.launch.run_folder.test_checkpoints import write_checkpoint
from tests.launch.training.test_ending import recorded_algorithm
from tests.launch.training.test_training import BREVITY, SMALL


def test_taking_a_run_over_ends_the_process_that_trains_it_and_nothing_is_overwritten(
    home: Path, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states: list[dict[str, bytes]] = []

    def train(self: Trainer, *_: object) -> int:
        """Trains with recorded updates; after update 3, another machine resumes the run and trains update 4."""
        algo = recorded_algorithm(tmp_path / "recorded")
        next_update = algo.train

        def train_update() -> object:
            if algo.updates == 3:
                checkpoints.finish()
                with on_another_machine(tmp_path):
                    other = resume(path)
                    other.cut_after(3)
                    other.metrics_file.append({"update": 4, "seconds": 2.0})
                    other.checkpoints.save(4, lambda folder: write_checkpoint(folder, "of the other machine"))
                    other.upload()
                states.append(contents(path))
            return next_update()

        algo.train = train_update
        with CheckpointWriter(self.run, self.settings.keep_checkpoints, pytest.fail) as checkpoints:
            self._loop(algo, checkpoints)
        return 0

    monkeypatch.setattr(Trainer, "train", train)
    words = ["imdb-tiny", "backend=transformers", "num_runners=0", "checkpoint_every=1"]
    assert main(["train", *words, "--out", f"file://{path}"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"Error: file://{path} was taken over by process " in error and "Resume with" not in error
    assert states == [contents(path)] and Storage(f"file://{path}").updates()[-1] == 4
    (folder,) = (home / "cory-rllib" / "runs").glob("*/run")
    assert f"Its results are in {folder} on " in error
    assert [line["update"] for line in Run.open(folder).metrics][:4] == [1, 2, 3, 4]


def test_a_process_that_was_taken_over_writes_nothing_even_if_the_new_writer_has_ended(
    path: Path, tmp_path: Path
) -> None:
    run = stored_run(path)
    with on_another_machine(tmp_path):
        other = resume(path)
        other.metrics_file.append({"update": 7})
        end(other)
    before = contents(path)
    run.metrics_file.append({"update": 7, "seconds": 1.0})
    run.checkpoints.save(7, write_checkpoint)
    for upload in (run.upload, run.finish_upload):
        with pytest.raises(WriterChangedError, match=f"was taken over by process .* results are in {run.path} on "):
            upload()
    run.abort()  # it has records
    assert contents(path) == before and len(run.metrics) == 8


def test_opening_a_run_takes_nothing_over(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = stored_run(path)
    before = contents(path)
    with on_another_machine(tmp_path):
        assert main(["train", "--resume", f"file://{path}", "--print-config"]) == 0
        assert main(["train", "--resume", f"file://{path}", "lr=1"]) == 2
        with pytest.raises(CommandError, match="already has a run"):
            StoredRun.create(f"file://{path}")
    assert contents(path) == before
    run.upload()


def test_of_two_new_runs_that_start_at_once_the_first_ends_and_the_second_is_complete(
    path: Path, tmp_path: Path
) -> None:
    run = StoredRun.create(f"file://{path}")
    run.write_settings(SETTINGS, "cory train")
    with on_another_machine(tmp_path):
        other = StoredRun.create(f"file://{path}")
    other.write_settings(SETTINGS, "cory train")
    other.upload()
    before = contents(path)
    with pytest.raises(WriterChangedError):
        run.upload()
    run.abort()
    assert contents(path) == before and not run.path.exists()
    (path / "config.yaml").unlink()  # the first process was just clearing what it had found
    other.upload()
    assert contents(path) == before
    other.abort()
    assert not contents(path) and not other.path.exists()


def test_a_checkpoint_that_the_other_process_was_just_completing_is_removed(path: Path, tmp_path: Path) -> None:
    run = stored_run(path)
    manifest = (path / "checkpoints/update_000006/manifest.json").read_bytes()
    (path / "checkpoints/update_000006/manifest.json").unlink()
    with on_another_machine(tmp_path):
        other = resume(path)
        other.cut_after(0)
        (path / "checkpoints/update_000006/manifest.json").write_bytes(manifest)  # arrives after the takeover
        other.metrics_file.append({"update": 1, "seconds": 2.0})
        other.checkpoints.save(1, write_checkpoint)
        other.upload()
    assert Storage(f"file://{path}").updates() == [0, 1]
    assert [line["update"] for line in Run.open(path).metrics] == [0, 1]
    run.unlock()


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Returns a run's metrics without times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if key not in ("seconds", "tokens_per_second")} for line in lines
    ]


@pytest.mark.slow
def test_after_a_kill_the_same_command_continues_exactly_from_storage_on_another_machine(
    path: Path, cory: Cory, tmp_path: Path
) -> None:
    (tmp_path / "my_rewards.py").write_text(BREVITY)
    small = ("train", *SMALL, "dtype=fp32", "num_updates=4", "checkpoint_every=1")
    words = (*small, "--out", f"file://{path}", "--continue")
    process = start_cory(tmp_path, *words, XDG_CACHE_HOME=str(tmp_path / "one"))
    assert process.stdout and process.stderr
    while not (line := process.stdout.readline()).lstrip().startswith("3/4"):
        assert line, process.stderr.read()  # it ended before its last update
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    again = cory(*words, XDG_CACHE_HOME=str(tmp_path / "another"))
    assert again.returncode == 0 and "(resuming after update " in again.stdout, again.stderr
    undisturbed = cory(*small, "--out", "undisturbed")
    assert undisturbed.returncode == 0, undisturbed.stderr
    assert metrics(path) == metrics(tmp_path / "undisturbed")
    assert not list((tmp_path / "another" / "cory-rllib" / "runs").iterdir())
    done = cory(*words, XDG_CACHE_HOME=str(tmp_path / "one"))  # its local folder is older
    assert done.returncode == 0 and "is done: all 4 updates are completed" in done.stdout
