"""Taking a run in storage over from a process that still trains it."""

from pathlib import Path

import pytest

from launch.console.errors import CommandError
from launch.main import main
from launch.run_folder.run import Run
from launch.run_folder.storage import Storage, WriterChangedError
from launch.run_folder.stored_run import StoredRun
from launch.training.saving import CheckpointWriter
from launch.training.training import Trainer
from tests.launch.run_folder.conftest import SETTINGS, contents, end, on_another_machine, resume, stored_run
from tests.launch.run_folder.test_checkpoints import write_checkpoint
from tests.launch.training.test_ending import recorded_algorithm


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
                    other.metrics.append({"update": 4, "seconds": 2.0})
                    other.checkpoints.save(4, lambda folder: write_checkpoint(folder, "of the other machine"))
                    other.upload()
                states.append(contents(path))
            return next_update()

        algo.train = train_update
        with CheckpointWriter(self.run, self.settings.keep_checkpoints, pytest.fail) as checkpoints:
            self._loop(algo, checkpoints)
        return 0

    monkeypatch.setattr(Trainer, "train", train)
    words = ["imdb-tiny", "backend=transformers", "num_runners=0", "checkpoint_every=1", "samples_every=100"]
    assert main(["train", *words, "--out", f"file://{path}"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"Error: file://{path} was taken over by process " in error and "Resume with" not in error
    assert states == [contents(path)] and Storage(f"file://{path}").updates()[-1] == 4
    (folder,) = (home / "cory-rllib" / "runs").glob("*/run")
    assert f"Its results are in {folder} on " in error
    assert [line["update"] for line in Run.open(folder).updates()][:4] == [1, 2, 3, 4]


def test_a_process_that_was_taken_over_writes_nothing_even_if_the_new_writer_has_ended(
    path: Path, tmp_path: Path
) -> None:
    run = stored_run(path)
    with on_another_machine(tmp_path):
        other = resume(path)
        other.metrics.append({"update": 7})
        end(other)
    before = contents(path)
    run.metrics.append({"update": 7, "seconds": 1.0})
    run.checkpoints.save(7, write_checkpoint)
    for upload in (run.upload, run.finish_upload):
        with pytest.raises(WriterChangedError, match=f"was taken over by process .* results are in {run.path} on "):
            upload()
    run.abort()  # it has records
    assert contents(path) == before and len(run.updates()) == 8


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
        other.metrics.append({"update": 1, "seconds": 2.0})
        other.checkpoints.save(1, write_checkpoint)
        other.upload()
    assert Storage(f"file://{path}").updates() == [0, 1]
    assert [line["update"] for line in Run.open(path).updates()] == [0, 1]
    run.unlock()
