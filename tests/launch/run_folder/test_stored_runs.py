"""Runs in storage, resumed on the same or another machine."""

import shutil
from pathlib import Path

import pytest

import cory_rllib
from launch.console.configuration import settings_to_yaml
from launch.console.errors import CommandError
from launch.main import main
from launch.run_folder.run import Run
from launch.run_folder.storage import Storage, StorageError
from launch.run_folder.stored_run import StoredRun
from launch.training.saving import CheckpointWriter
from launch.training.training import Trainer
from policies.cory import CoryConfig
from tests.launch.conftest import mount, record_test_run
from tests.launch.run_folder.conftest import SETTINGS, contents, end, on_another_machine, resume, stored_run
from tests.launch.run_folder.test_checkpoints import write_checkpoint
from tests.launch.training.test_ending import recorded_algorithm
from tests.paper import paper_settings


def test_a_run_is_resumed_from_storage_alone_and_leaves_no_local_copy(home: Path, path: Path) -> None:
    run = stored_run(path)
    with pytest.raises(CommandError, match="in use by another run"):
        StoredRun.open(f"file://{path}")
    end(run)
    assert not list((home / "cory-rllib" / "runs").iterdir())
    with pytest.raises(
        CommandError, match=rf"already has a run, .*\. Resume it with `cory train --resume file://{path}`"
    ):
        StoredRun.create(f"file://{path}")
    resumed = StoredRun.open(f"file://{path}")
    assert [line["update"] for line in resumed.metrics] == list(range(7)) and resumed.checkpoints.empty()
    resumed.take_over()
    assert resumed.checkpoints.updates() == [6] and resumed.metrics == Run.open(path).metrics
    assert Run.open(path).checkpoints.updates() == [0, 6]  # commands read a mounted bucket like a folder


def test_a_run_in_storage_that_was_trained_from_python_stays_on_this_machine(
    home: Path, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(self: Trainer, *_: object) -> int:
        with CheckpointWriter(self.run, 2, pytest.fail) as checkpoints:
            self._loop(recorded_algorithm(tmp_path / "recorded"), checkpoints)
        return self.settings.num_updates

    monkeypatch.setattr(Trainer, "train", train)
    settings = paper_settings(backend="transformers", num_runners=0, num_updates=12)
    config = CoryConfig().cory(**settings.model_dump())
    run = cory_rllib.train(config, out=f"file://{path}", quiet=True)
    assert home in run.path.parents and run.location == str(run.path) and run.metrics == Run.open(path).metrics
    assert Run.open(run.path).checkpoints.updates() == Run.open(path).checkpoints.updates() == [10, 12]
    with pytest.raises(CommandError, match=f"^file://{path} is a URI, which only `cory train` takes"):
        cory_rllib.load_run(f"file://{path}")


def test_a_damaged_checkpoint_in_storage_is_reported_and_replaced_when_training_reaches_it_again(path: Path) -> None:
    end(stored_run(path))
    (path / "checkpoints" / "update_000006" / "deep" / "weights").write_text("torn")
    for _ in range(2):  # nothing is removed from storage before training resumes
        resumed = resume(path)
        assert Storage(f"file://{path}").updates() == [0, 6]
        resumed.unlock()
    resumed.lock()
    assert "update_000006 has a damaged file" in resumed.checkpoints.quarantine_damaged()[0]
    assert resumed.checkpoints.updates() == [0]
    resumed.cut_after(0)
    resumed.checkpoints.save(6, write_checkpoint)
    resumed.upload()
    assert Run.open(path).checkpoints.choose("6")[0] == 6


def test_an_interrupted_removal_of_the_local_folder_is_not_mistaken_for_the_run(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        run.metrics_file.path.unlink()
        raise KeyboardInterrupt

    run = stored_run(path)
    with monkeypatch.context() as interrupted, pytest.raises(KeyboardInterrupt):
        interrupted.setattr(shutil, "rmtree", interrupt)
        end(run)
    run.unlock()
    assert len(StoredRun.open(f"file://{path}").metrics) == 7


def test_full_or_read_only_storage_keeps_its_state_and_is_updated_later(home: Path, disk: Path) -> None:
    run = stored_run(disk / "run")
    run.checkpoints.save(9, lambda folder: (folder / "weights").write_bytes(b"0" * 4 * 2**20))
    with pytest.raises(StorageError, match=r"run cannot be written: .*No space left on device"):
        run.upload()
    mount("-o", "remount,ro", str(disk))
    with pytest.raises(StorageError, match=r"Read-only file system.*the run is in .*`cory train --resume file://"):
        run.finish_upload()
    run.unlock()
    assert Storage(f"file://{disk}/run").updates() == [0, 6]
    mount("-o", "remount,rw,size=16m", str(disk))
    resume(disk / "run")  # on the machine that has update 9
    assert Run.open(disk / "run").checkpoints.choose("latest")[0] == 9


def test_a_newer_run_in_storage_replaces_the_local_files_of_an_older_run(path: Path, tmp_path: Path) -> None:
    stored_run(path).unlock()  # its local folder still exists
    shutil.rmtree(path)
    with on_another_machine(tmp_path):
        stored_run(path, updates=4, saved=(0, 3)).unlock()
    resumed = resume(path)
    assert resumed.checkpoints.updates() == [3] and [line["update"] for line in resumed.metrics] == list(range(4))


def test_a_run_that_another_machine_continues_meanwhile_has_that_machines_settings(path: Path, tmp_path: Path) -> None:
    stored_run(path).unlock()
    run = StoredRun.open(f"file://{path}")
    assert run.settings == SETTINGS
    longer = SETTINGS.model_copy(update={"num_updates": 24})
    with on_another_machine(tmp_path):
        other = resume(path)
        other.write_settings(longer, "cory train --resume")
        other.checkpoints.save(9, write_checkpoint)
        other.upload()
    run.take_over()
    assert run.settings == longer and run.checkpoints.updates() == [9]


def test_later_local_updates_are_kept_if_another_machine_took_over_but_made_no_progress(
    path: Path, tmp_path: Path
) -> None:
    run = stored_run(path)
    run.checkpoints.save(9, write_checkpoint)
    run.unlock()  # storage could not be written
    with on_another_machine(tmp_path):
        other = resume(path)
        assert other.checkpoints.updates() == [6]
        other.unlock()
    resume(path).unlock()
    assert run.checkpoints.updates() == [0, 6, 9]
    with on_another_machine(tmp_path):
        other = resume(path)
        assert other.checkpoints.updates() == [9]
        other.checkpoints.save(12, write_checkpoint)
        other.upload()
        other.unlock()
    assert resume(path).checkpoints.updates() == [12]


def test_an_update_repeated_by_another_machine_replaces_the_local_one(path: Path, tmp_path: Path) -> None:
    stored_run(path).unlock()
    shutil.rmtree(path / "checkpoints" / "update_000006")
    with on_another_machine(tmp_path):
        other = resume(path)
        other.cut_after(0)
        for update in range(1, 7):
            other.metrics_file.append({"update": update, "seconds": 2.0})
        other.checkpoints.save(6, lambda folder: write_checkpoint(folder, "repeated"))
        other.upload()
    resumed = resume(path)
    assert resumed.metrics == other.metrics == Run.open(path).metrics
    assert (resumed.checkpoints.choose("6")[1] / "deep" / "weights").read_text() == "repeated"


def test_later_local_updates_survive_an_interrupted_takeover_and_the_output_of_settings(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    run = stored_run(path)
    run.checkpoints.save(9, write_checkpoint)
    run.unlock()  # storage could not be written
    with monkeypatch.context() as interrupted, pytest.raises(KeyboardInterrupt):
        interrupted.setattr(Storage, "upload", interrupt)
        resumed = StoredRun.open(f"file://{path}")
        resumed.take_over()
    resumed.unlock()
    with on_another_machine(tmp_path):
        resume(path).unlock()
    assert main(["train", "--resume", f"file://{path}", "--print-config"]) == 0
    assert run.checkpoints.updates() == [0, 6, 9]


def test_a_local_folder_is_not_mistaken_for_a_run_if_a_kill_interrupts_its_download(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    stored_run(path).unlock()
    with on_another_machine(tmp_path):
        other = resume(path)
        other.checkpoints.save(9, write_checkpoint)
        other.upload()
        other.unlock()
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(Storage, "download_checkpoint", interrupt)
        run = StoredRun.open(f"file://{path}")
        run.take_over()
    assert not run.checkpoints.updates()
    run.unlock()
    assert resume(path).checkpoints.updates() == [9]


@pytest.mark.parametrize("uploaded", [(), ("config.yaml", "metrics.jsonl")])
def test_a_run_whose_checkpoints_were_not_uploaded_is_not_replaced_and_resumes_locally(
    path: Path, uploaded: tuple[str, ...]
) -> None:
    run = stored_run(path)
    run.unlock()
    shutil.rmtree(path)
    path.mkdir()
    for name in uploaded:
        shutil.copy(run.path / name, path)
    with pytest.raises(
        CommandError, match=f"or in {run.path} on .* with `cory train --resume file://{path}`, or choose"
    ):
        StoredRun.create(f"file://{path}")
    assert run.checkpoints.updates() == [0, 6] and sorted(contents(path)) == sorted(uploaded)
    assert StoredRun.is_started(f"file://{path}") and not StoredRun.is_started(f"file://{path}2")
    resume(path).unlock()
    assert run.checkpoints.updates() == Run.open(path).checkpoints.updates() == [0, 6]
    shutil.rmtree(run.path)
    assert StoredRun.is_started(f"file://{path}")


def test_repeated_updates_replace_their_first_records_in_storage(path: Path) -> None:
    run = stored_run(path)
    for update in (7, 8):
        run.metrics_file.append({"update": update, "seconds": 1.0})
    run.upload()
    run.cut_after(6)
    for update in (7, 8, 9):
        run.metrics_file.append({"update": update, "seconds": 2.0})
    run.checkpoints.save(9, write_checkpoint)
    run.unlock()  # as if storage had not been writable until the end
    resumed = resume(path)
    assert resumed.checkpoints.updates() == [0, 6, 9] and len(resumed.metrics) == 10
    assert Run.open(path).metrics == resumed.metrics


def test_a_location_without_a_checkpoint_or_with_other_files_is_rejected(path: Path) -> None:
    run = StoredRun.create(f"file://{path}")
    run.write_settings(SETTINGS, "cory train")
    run.upload()
    run.unlock()
    with pytest.raises(CommandError, match=f"^file://{path} has no run with a checkpoint to resume from"):
        StoredRun.open(f"file://{path}")
    StoredRun.create(f"file://{path}").unlock()
    (path / "thesis.tex").touch()
    with pytest.raises(CommandError, match=f"^file://{path} is not empty and has no run"):
        StoredRun.create(f"file://{path}")


def test_a_local_copy_with_a_damaged_checkpoint_is_replaced(path: Path) -> None:
    run = stored_run(path)
    (run.checkpoints.path_of(6) / "deep" / "weights").write_text("torn")
    run.unlock()
    resumed = resume(path)
    assert resumed.checkpoints.updates() == [6] and resumed.checkpoints.latest_valid() == 6


def test_curves_drawn_after_the_last_checkpoint_are_uploaded_later_if_storage_failed(path: Path) -> None:
    run = stored_run(path)
    run.curves.write_text("drawn")
    run.unlock()
    resumed = resume(path)
    assert resumed.checkpoints.updates() == [0, 6] and resumed.curves.exists()
    assert Run.open(path).curves.read_text() == "drawn"


@pytest.mark.parametrize(
    "words",
    [
        ["plot", "URI"],
        ["plot", "runs/one", "URI"],
        ["runs", "URI"],
        ["evaluate", "URI"],
        ["probe", "URI"],
        ["export", "URI", "--out", "model"],
        ["generate", "URI", "a query"],
        ["serve", "URI"],
        ["train", "imdb-tiny", "start_from=URI"],
    ],
)
def test_other_commands_reject_uris(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    record_test_run(tmp_path / "runs" / "one", SETTINGS).unlock()
    before = contents(tmp_path)
    for uri, message in (
        ("s3://bucket/run", "is a URI"),
        (f"file://{tmp_path}/runs/one", "Mount the bucket, or copy the run to a folder, for example with `aws s3 sync"),
    ):
        assert main([word.replace("URI", uri) for word in words]) == 2
        error = capsys.readouterr().err
        assert uri in error and message in error and "Traceback" not in error
    assert contents(tmp_path) == before


def test_a_rejected_uri_does_not_repeat_its_password(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", "s3://me:hunter2@bucket/run"]) == 2
    error = capsys.readouterr().err
    assert "contains a password" in error and "hunter2" not in error


@pytest.fixture(params=["--resume", "--continue"])
def command(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """Arguments of `cory train` that resume a finished `stored_run` of 6 updates."""
    uri, settings = f"file://{tmp_path / 'storage' / 'run'}", tmp_path / "same.yaml"
    settings.write_text(settings_to_yaml(SETTINGS.model_copy(update={"num_updates": 6})))
    return (
        ["--resume", uri, "num_updates=6", "--allow-changes"]
        if request.param == "--resume"
        else ["-c", str(settings), "--out", uri, "--continue"]
    )


def test_resuming_a_finished_run_in_storage_says_so_and_leaves_no_local_files(
    home: Path, path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    end(stored_run(path))
    before = contents(path)
    assert main(["train", *command]) == 0
    assert "is done: all 6 updates are completed. To train longer: " in capsys.readouterr().out
    after = contents(path)
    assert (after.pop(".writer") != before.pop(".writer")) == (command[0] == "--resume") and after == before
    assert not list((home / "cory-rllib" / "runs").iterdir())


@pytest.mark.parametrize("missing", ["checkpoints/update_000006", "curves.png"])
def test_a_finished_but_incompletely_uploaded_run_is_uploaded_and_removed_locally(
    home: Path, path: Path, command: list[str], missing: str
) -> None:
    run = stored_run(path)
    run.curves.write_text("drawn")
    run.upload()
    run.unlock()
    if missing == run.curves.name:
        (path / missing).unlink()
    else:
        shutil.rmtree(path / missing)
    assert main(["train", *command]) == 0
    assert Run.open(path).checkpoints.choose("6")[0] == 6 and (path / "curves.png").exists()
    assert not list((home / "cory-rllib" / "runs").iterdir())
