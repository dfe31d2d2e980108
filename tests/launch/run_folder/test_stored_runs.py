"""Runs in storage: all that a run needs to go on elsewhere."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from launch.console.configuration import as_yaml
from launch.console.errors import CommandError
from launch.main import main
from launch.run_folder.lease import Owner
from launch.run_folder.run import Run, is_begun
from launch.run_folder.storage import Storage, StorageError
from tests.launch.conftest import mount
from tests.launch.run_folder.conftest import SETTINGS, on_another_machine, stored_run
from tests.launch.run_folder.test_checkpoints import write


def test_a_run_is_taken_up_from_storage_alone_and_ends_without_a_local_copy(home: Path, tmp_path: Path) -> None:
    place = tmp_path / "storage" / "run"
    run = stored_run(place)
    with pytest.raises(CommandError, match="in use by another run"):
        Run.open(f"file://{place}")
    run.finalize_upload()
    run.unlock()
    assert not list((home / "cory-rllib" / "runs").iterdir())
    with pytest.raises(CommandError, match=f"has a run, .*: go on with it by `cory train --resume file://{place}`"):
        Run.create(f"file://{place}")
    again = Run.open(f"file://{place}")
    assert [line["update"] for line in again.updates()] == list(range(7)) and again.checkpoints.empty()
    again.download_checkpoint()
    assert again.checkpoints.updates() == [6]
    again.unlock()
    assert Run.open(place).checkpoints.updates() == [0, 6]  # a path is as good as its URI


def test_a_damaged_checkpoint_in_storage_is_told_of_and_replaced_when_the_run_comes_there_again(
    home: Path, tmp_path: Path
) -> None:
    place = tmp_path / "storage" / "run"
    run = stored_run(place)
    run.finalize_upload()
    run.unlock()
    (place / "checkpoints" / "update_000006" / "deep" / "weights").write_text("torn")
    for _ in range(2):  # nothing is removed from storage before training has gone on
        again = Run.open(f"file://{place}")
        again.download_checkpoint()
        assert Storage(f"file://{place}").updates() == [0, 6]
        again.unlock()
    again.lock()
    assert "update_000006 has a damaged file" in again.checkpoints.quarantine_damaged()[0]
    assert again.checkpoints.updates() == [0]
    again.checkpoints.save(6, write)
    again.upload()
    assert Run.open(place).checkpoints.choose("6")[0] == 6


def test_what_an_interrupt_leaves_of_a_local_folder_is_not_taken_for_the_run(
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
    again = Run.open(f"file://{tmp_path}/storage/run")
    assert len(again.updates()) == 7
    again.unlock()


def test_storage_that_is_full_or_read_only_keeps_its_state_and_takes_the_rest_later(
    home: Path, tmp_path: Path, disk: Path
) -> None:
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
    again = Run.open(f"file://{disk}/run")  # on the machine that has update 9
    assert Run.open(disk / "run").checkpoints.choose("latest")[0] == 9
    again.unlock()


def test_a_newer_run_in_storage_wins_over_what_an_older_one_left_on_this_machine(home: Path, tmp_path: Path) -> None:
    place = tmp_path / "storage" / "run"
    stored_run(place).unlock()  # ended without handing over: its local folder is still here
    shutil.rmtree(place)
    with on_another_machine(tmp_path):
        stored_run(place, updates=4, saved=(0, 3)).unlock()
    again = Run.open(f"file://{place}")
    again.download_checkpoint()
    assert again.checkpoints.updates() == [3] and [line["update"] for line in again.updates()] == list(range(4))


def test_what_this_machine_did_after_another_had_taken_the_run_over_is_not_lost_if_that_came_no_further(
    home: Path, tmp_path: Path
) -> None:
    place = tmp_path / "storage" / "run"
    run = stored_run(place)
    run.checkpoints.save(9, write)
    run.unlock()  # storage could not be written
    with on_another_machine(tmp_path):
        other = Run.open(f"file://{place}")
        other.download_checkpoint()
        assert other.checkpoints.updates() == [6]
        other.unlock()
    Run.open(f"file://{place}").unlock()
    assert run.checkpoints.updates() == [0, 6, 9]
    with on_another_machine(tmp_path):
        other = Run.open(f"file://{place}")
        other.download_checkpoint()
        assert other.checkpoints.updates() == [9]
        other.checkpoints.save(12, write)
        other.upload()
        other.unlock()
    again = Run.open(f"file://{place}")
    again.download_checkpoint()
    assert again.checkpoints.updates() == [12]


def test_an_update_that_another_machine_did_anew_wins_over_the_one_that_was_left_on_this_machine(
    home: Path, tmp_path: Path
) -> None:
    place = tmp_path / "storage" / "run"
    stored_run(place).unlock()
    shutil.rmtree(place / "checkpoints" / "update_000006")
    with on_another_machine(tmp_path):
        other = Run.open(f"file://{place}")
        other.cut_after(0)
        for update in range(1, 7):
            other.metrics.append({"update": update, "seconds": 2.0})
        other.checkpoints.save(6, lambda folder: write(folder, "done anew"))
        other.upload()
        other.unlock()
    again = Run.open(f"file://{place}")
    again.download_checkpoint()
    assert again.updates() == other.updates() == Run.open(place).updates()
    assert (again.checkpoints.choose("6")[1] / "deep" / "weights").read_text() == "done anew"


def test_a_folder_and_its_uri_are_one_run_that_one_process_trains(home: Path, tmp_path: Path) -> None:
    place = tmp_path / "storage" / "run"
    run = Run.create(f"file://{place}")
    run.write_settings(SETTINGS, "cory train")
    run.upload()
    with pytest.raises(CommandError, match=f"^{place} is in use by another run"):
        Run.create(place)
    run.unlock()
    owner = Owner("another", "elsewhere", 1, time.time())  # killed, as its lock of the folder says
    (place / ".lease").write_text(json.dumps(owner._asdict()))
    Run.create(f"file://{place}").unlock()  # nothing was saved
    in_folder = Run.create(place)
    with pytest.raises(CommandError, match=f"^{place} is in use by another run"):
        Run.create(f"file://{place}")
    in_folder.unlock()


@pytest.mark.parametrize("arrived", [(), ("config.yaml", "metrics.jsonl")])
def test_a_run_whose_checkpoints_never_arrived_is_not_replaced_and_goes_on_from_this_machine(
    home: Path, tmp_path: Path, arrived: tuple[str, ...]
) -> None:
    place = tmp_path / "storage" / "run"
    run = stored_run(place)
    run.unlock()
    shutil.rmtree(place)
    place.mkdir()
    for name in arrived:
        shutil.copy(run.path / name, place)
    with pytest.raises(CommandError, match=f"or in {run.path} on .* by `cory train --resume file://{place}`, or name"):
        Run.create(f"file://{place}")
    assert run.checkpoints.updates() == [0, 6]
    assert not (place / ".lease").exists()
    assert is_begun(f"file://{place}") and not is_begun(f"file://{place}2")
    Run.open(f"file://{place}").unlock()
    assert run.checkpoints.updates() == Run.open(place).checkpoints.updates() == [0, 6]
    shutil.rmtree(run.path)
    assert is_begun(f"file://{place}")


def test_updates_that_were_done_anew_after_a_failure_are_not_lost_where_storage_has_their_first_lines(
    home: Path, tmp_path: Path
) -> None:
    place = tmp_path / "storage" / "run"
    run = stored_run(place)
    for update in (7, 8):
        run.metrics.append({"update": update, "seconds": 1.0})
    run.upload()
    run.cut_after(6)
    for update in (7, 8, 9):
        run.metrics.append({"update": update, "seconds": 2.0})
    run.checkpoints.save(9, write)
    run.unlock()  # storage could not be written until the end
    again = Run.open(f"file://{place}")
    assert again.checkpoints.updates() == [0, 6, 9] and len(again.updates()) == 10
    assert Run.open(place).updates() == again.updates()


def test_a_run_that_failed_before_its_first_checkpoint_is_nothing_to_go_on_with(home: Path, tmp_path: Path) -> None:
    uri = f"file://{tmp_path / 'storage' / 'run'}"
    run = Run.create(uri)
    run.write_settings(SETTINGS, "cory train")
    run.upload()
    run.unlock()
    with pytest.raises(CommandError, match=f"^{uri} has no run with a checkpoint to go on from"):
        Run.open(uri)


def test_a_copy_of_the_metrics_that_was_cut_off_is_of_the_same_run(home: Path, tmp_path: Path) -> None:
    place = tmp_path / "storage" / "run"
    run = stored_run(place)
    run.checkpoints.save(9, write)
    run.unlock()
    (place / "metrics.jsonl").write_bytes(run.metrics.path.read_bytes()[:-5])
    again = Run.open(f"file://{place}")
    assert again.checkpoints.updates() == [0, 6, 9]
    assert Run.open(place).updates() == again.updates() and len(again.updates()) == 7


def test_a_run_of_which_storage_has_only_the_start_is_not_taken_for_another_on_this_machine(
    home: Path, tmp_path: Path
) -> None:
    place = tmp_path / "storage" / "run"
    stored_run(place).unlock()
    shutil.rmtree(place)
    with on_another_machine(tmp_path):
        stored_run(place, updates=1, saved=(0,)).unlock()
    again = Run.open(f"file://{place}")
    again.download_checkpoint()
    assert again.checkpoints.updates() == [0] and len(again.updates()) == 1


def test_what_was_drawn_after_the_last_checkpoint_arrived_is_not_lost_where_storage_failed_then(
    home: Path, tmp_path: Path
) -> None:
    place = tmp_path / "storage" / "run"
    run = stored_run(place)
    run.curves.write_text("drawn")
    run.unlock()
    again = Run.open(f"file://{place}")
    assert again.checkpoints.updates() == [0, 6] and again.curves.exists()
    assert Run.open(place).curves.read_text() == "drawn"
    again.unlock()


@pytest.fixture(params=["--resume", "--continue"])
def command(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """`cory train` of what `stored_run` made, if that was to do 6 updates."""
    uri, settings = f"file://{tmp_path / 'storage' / 'run'}", tmp_path / "same.yaml"
    settings.write_text(as_yaml(SETTINGS.model_copy(update={"num_updates": 6})))
    return (
        ["--resume", uri, "num_updates=6", "--allow-changes"]
        if request.param == "--resume"
        else ["-c", str(settings), "--out", uri, "--continue"]
    )


def test_a_run_that_is_done_in_storage_is_told_so_and_leaves_nothing_here(
    home: Path, tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stored_run(tmp_path / "storage" / "run")
    run.finalize_upload()
    run.unlock()
    copied: list[str] = []
    download = Storage._download

    def noted(self: Storage, name: str, *rest: Any) -> None:
        copied.append(name)
        download(self, name, *rest)

    monkeypatch.setattr(Storage, "_download", noted)
    assert main(["train", *command]) == 0
    assert "is done: all 6 updates are completed. To train longer: " in capsys.readouterr().out
    own = [name for name in copied if not name.startswith("checkpoints/")]
    assert sorted(own) == ["config.yaml", "metrics.jsonl", "run.id"]
    assert (copied == own) == (command[0] != "--resume")  # which looks whether it is whole
    assert not list((home / "cory-rllib" / "runs").iterdir())


@pytest.mark.parametrize("missing", ["checkpoints/update_000006", "curves.png"])
def test_a_run_that_is_done_and_never_arrived_whole_is_copied_from_this_machine_and_leaves_it(
    home: Path, tmp_path: Path, command: list[str], missing: str
) -> None:
    place = tmp_path / "storage" / "run"
    run = stored_run(place)
    run.curves.write_text("drawn")
    run.upload()
    run.unlock()
    if missing == run.curves.name:
        (place / missing).unlink()
    else:
        shutil.rmtree(place / missing)
    assert main(["train", *command]) == 0
    assert Run.open(place).checkpoints.choose("6")[0] == 6 and (place / "curves.png").exists()
    assert not list((home / "cory-rllib" / "runs").iterdir())
