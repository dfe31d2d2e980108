"""Resuming runs in storage, on the same or another machine."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from launch.console.configuration import settings_to_yaml
from launch.console.errors import CommandError
from launch.main import main
from launch.run_folder.lease import Owner
from launch.run_folder.run import Run, is_started
from launch.run_folder.storage import Storage, StorageError
from tests.launch.conftest import mount
from tests.launch.run_folder.conftest import SETTINGS, on_another_machine, stored_run
from tests.launch.run_folder.test_checkpoints import write_checkpoint


def test_a_run_is_resumed_from_storage_alone_and_leaves_no_local_copy(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "storage" / "run"
    run = stored_run(path)
    with pytest.raises(CommandError, match="in use by another run"):
        Run.open(f"file://{path}")
    run.finalize_upload()
    run.unlock()
    assert not list((home / "cory-rllib" / "runs").iterdir())
    with pytest.raises(
        CommandError, match=rf"already has a run, .*\. Resume it with `cory train --resume file://{path}`"
    ):
        Run.create(f"file://{path}")
    resumed = Run.open(f"file://{path}")
    assert [line["update"] for line in resumed.updates()] == list(range(7)) and resumed.checkpoints.empty()
    resumed.download_checkpoint()
    assert resumed.checkpoints.updates() == [6]
    resumed.unlock()
    assert Run.open(path).checkpoints.updates() == [0, 6]  # a path is equivalent to its URI


def test_a_damaged_checkpoint_in_storage_is_reported_and_replaced_when_training_reaches_it_again(
    home: Path, tmp_path: Path
) -> None:
    path = tmp_path / "storage" / "run"
    run = stored_run(path)
    run.finalize_upload()
    run.unlock()
    (path / "checkpoints" / "update_000006" / "deep" / "weights").write_text("torn")
    for _ in range(2):  # nothing is removed from storage before training resumes
        resumed = Run.open(f"file://{path}")
        resumed.download_checkpoint()
        assert Storage(f"file://{path}").updates() == [0, 6]
        resumed.unlock()
    resumed.lock()
    assert "update_000006 has a damaged file" in resumed.checkpoints.quarantine_damaged()[0]
    assert resumed.checkpoints.updates() == [0]
    resumed.checkpoints.save(6, write_checkpoint)
    resumed.upload()
    assert Run.open(path).checkpoints.choose("6")[0] == 6


def test_an_interrupted_removal_of_the_local_folder_is_not_mistaken_for_the_run(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        run.metrics.path.unlink()
        raise KeyboardInterrupt

    run = stored_run(tmp_path / "storage" / "run")
    with monkeypatch.context() as interrupted, pytest.raises(KeyboardInterrupt):
        interrupted.setattr(shutil, "rmtree", interrupt)
        run.finalize_upload()
    run.unlock()
    resumed = Run.open(f"file://{tmp_path}/storage/run")
    assert len(resumed.updates()) == 7
    resumed.unlock()


def test_full_or_read_only_storage_keeps_its_state_and_is_updated_later(home: Path, tmp_path: Path, disk: Path) -> None:
    run = stored_run(disk / "run")
    run.checkpoints.save(9, lambda folder: (folder / "weights").write_bytes(b"0" * 4 * 2**20))
    with pytest.raises(StorageError, match=r"run cannot be written: .*No space left on device"):
        run.upload()
    run.unlock()
    mount("-o", "remount,ro", str(disk))
    with pytest.raises(StorageError, match=r"Read-only file system.*the run is in .*`cory train --resume file://"):
        run.finalize_upload()
    assert Storage(f"file://{disk}/run").updates() == [0, 6]
    mount("-o", "remount,rw,size=16m", str(disk))
    resumed = Run.open(f"file://{disk}/run")  # on the machine that has update 9
    assert Run.open(disk / "run").checkpoints.choose("latest")[0] == 9
    resumed.unlock()


def test_a_newer_run_in_storage_replaces_the_local_files_of_an_older_run(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "storage" / "run"
    stored_run(path).unlock()  # its local folder still exists
    shutil.rmtree(path)
    with on_another_machine(tmp_path):
        stored_run(path, updates=4, saved=(0, 3)).unlock()
    resumed = Run.open(f"file://{path}")
    resumed.download_checkpoint()
    assert resumed.checkpoints.updates() == [3] and [line["update"] for line in resumed.updates()] == list(range(4))


def test_later_local_updates_are_kept_if_another_machine_took_over_but_made_no_progress(
    home: Path, tmp_path: Path
) -> None:
    path = tmp_path / "storage" / "run"
    run = stored_run(path)
    run.checkpoints.save(9, write_checkpoint)
    run.unlock()  # storage could not be written
    with on_another_machine(tmp_path):
        other = Run.open(f"file://{path}")
        other.download_checkpoint()
        assert other.checkpoints.updates() == [6]
        other.unlock()
    Run.open(f"file://{path}").unlock()
    assert run.checkpoints.updates() == [0, 6, 9]
    with on_another_machine(tmp_path):
        other = Run.open(f"file://{path}")
        other.download_checkpoint()
        assert other.checkpoints.updates() == [9]
        other.checkpoints.save(12, write_checkpoint)
        other.upload()
        other.unlock()
    resumed = Run.open(f"file://{path}")
    resumed.download_checkpoint()
    assert resumed.checkpoints.updates() == [12]


def test_an_update_repeated_by_another_machine_replaces_the_local_one(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "storage" / "run"
    stored_run(path).unlock()
    shutil.rmtree(path / "checkpoints" / "update_000006")
    with on_another_machine(tmp_path):
        other = Run.open(f"file://{path}")
        other.cut_after(0)
        for update in range(1, 7):
            other.metrics.append({"update": update, "seconds": 2.0})
        other.checkpoints.save(6, lambda folder: write_checkpoint(folder, "repeated"))
        other.upload()
        other.unlock()
    resumed = Run.open(f"file://{path}")
    resumed.download_checkpoint()
    assert resumed.updates() == other.updates() == Run.open(path).updates()
    assert (resumed.checkpoints.choose("6")[1] / "deep" / "weights").read_text() == "repeated"


def test_a_folder_and_its_uri_are_the_same_run_with_one_writer(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "storage" / "run"
    run = Run.create(f"file://{path}")
    run.write_settings(SETTINGS, "cory train")
    run.upload()
    with pytest.raises(CommandError, match=f"^{path} is in use by another run"):
        Run.create(path)
    run.unlock()
    owner = Owner("another", "elsewhere", 1, time.time())  # killed: it does not hold the folder's lock
    (path / ".lease").write_text(json.dumps(owner._asdict()))
    Run.create(f"file://{path}").unlock()  # no checkpoint
    in_folder = Run.create(path)
    with pytest.raises(CommandError, match=f"^{path} is in use by another run"):
        Run.create(f"file://{path}")
    in_folder.unlock()


@pytest.mark.parametrize("uploaded", [(), ("config.yaml", "metrics.jsonl")])
def test_a_run_whose_checkpoints_were_not_uploaded_is_not_replaced_and_resumes_locally(
    home: Path, tmp_path: Path, uploaded: tuple[str, ...]
) -> None:
    path = tmp_path / "storage" / "run"
    run = stored_run(path)
    run.unlock()
    shutil.rmtree(path)
    path.mkdir()
    for name in uploaded:
        shutil.copy(run.path / name, path)
    with pytest.raises(
        CommandError, match=f"or in {run.path} on .* with `cory train --resume file://{path}`, or choose"
    ):
        Run.create(f"file://{path}")
    assert run.checkpoints.updates() == [0, 6]
    assert not (path / ".lease").exists()
    assert is_started(f"file://{path}") and not is_started(f"file://{path}2")
    Run.open(f"file://{path}").unlock()
    assert run.checkpoints.updates() == Run.open(path).checkpoints.updates() == [0, 6]
    shutil.rmtree(run.path)
    assert is_started(f"file://{path}")


def test_repeated_updates_replace_their_first_records_in_storage(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "storage" / "run"
    run = stored_run(path)
    for update in (7, 8):
        run.metrics.append({"update": update, "seconds": 1.0})
    run.upload()
    run.cut_after(6)
    for update in (7, 8, 9):
        run.metrics.append({"update": update, "seconds": 2.0})
    run.checkpoints.save(9, write_checkpoint)
    run.unlock()  # as if storage had not been writable until the end
    resumed = Run.open(f"file://{path}")
    assert resumed.checkpoints.updates() == [0, 6, 9] and len(resumed.updates()) == 10
    assert Run.open(path).updates() == resumed.updates()


def test_a_run_without_a_checkpoint_cannot_be_resumed(home: Path, tmp_path: Path) -> None:
    uri = f"file://{tmp_path / 'storage' / 'run'}"
    run = Run.create(uri)
    run.write_settings(SETTINGS, "cory train")
    run.upload()
    run.unlock()
    with pytest.raises(CommandError, match=f"^{uri} has no run with a checkpoint to resume from"):
        Run.open(uri)


def test_truncated_metrics_in_storage_belong_to_the_same_run(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "storage" / "run"
    run = stored_run(path)
    run.checkpoints.save(9, write_checkpoint)
    run.unlock()
    (path / "metrics.jsonl").write_bytes(run.metrics.path.read_bytes()[:-5])
    resumed = Run.open(f"file://{path}")
    assert resumed.checkpoints.updates() == [0, 6, 9]
    assert Run.open(path).updates() == resumed.updates() and len(resumed.updates()) == 7


def test_a_new_run_in_storage_is_not_mistaken_for_another_local_run(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "storage" / "run"
    stored_run(path).unlock()
    shutil.rmtree(path)
    with on_another_machine(tmp_path):
        stored_run(path, updates=1, saved=(0,)).unlock()
    resumed = Run.open(f"file://{path}")
    resumed.download_checkpoint()
    assert resumed.checkpoints.updates() == [0] and len(resumed.updates()) == 1


def test_curves_drawn_after_the_last_checkpoint_are_uploaded_later_if_storage_failed(
    home: Path, tmp_path: Path
) -> None:
    path = tmp_path / "storage" / "run"
    run = stored_run(path)
    run.curves.write_text("drawn")
    run.unlock()
    resumed = Run.open(f"file://{path}")
    assert resumed.checkpoints.updates() == [0, 6] and resumed.curves.exists()
    assert Run.open(path).curves.read_text() == "drawn"
    resumed.unlock()


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
    home: Path, tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stored_run(tmp_path / "storage" / "run")
    run.finalize_upload()
    run.unlock()
    downloads: list[str] = []
    download = Storage._download

    def record_download(self: Storage, name: str, *rest: Any) -> None:
        downloads.append(name)
        download(self, name, *rest)

    monkeypatch.setattr(Storage, "_download", record_download)
    assert main(["train", *command]) == 0
    assert "is done: all 6 updates are completed. To train longer: " in capsys.readouterr().out
    run_files = [name for name in downloads if not name.startswith("checkpoints/")]
    assert sorted(run_files) == ["config.yaml", "metrics.jsonl", "run.id"]
    assert (downloads == run_files) == (command[0] != "--resume")  # --resume verifies the checkpoint
    assert not list((home / "cory-rllib" / "runs").iterdir())


@pytest.mark.parametrize("missing", ["checkpoints/update_000006", "curves.png"])
def test_a_finished_but_incompletely_uploaded_run_is_uploaded_and_removed_locally(
    home: Path, tmp_path: Path, command: list[str], missing: str
) -> None:
    path = tmp_path / "storage" / "run"
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
