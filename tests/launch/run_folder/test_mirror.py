"""Runs in storage: all that a run needs to go on elsewhere, and all that commands need to read it."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from launch.commands import export, generate, plot, train, watch
from launch.commands.evaluate import _run_in
from launch.console.configuration import as_yaml
from launch.console.errors import CommandError
from launch.models.trained import POLICIES, STATE, open_trained
from launch.report.runs import read_run as report_of
from launch.run_folder import final
from launch.run_folder.directory import RunDirectory
from launch.run_folder.journal import Journal
from launch.run_folder.mirror import create_run, hand_over, is_begun, open_run, read_run
from launch.run_folder.records import Update
from launch.run_folder.storage import Storage, StorageError
from policies.settings.settings import Settings
from tests.launch.commands.test_report import evaluated, sampled
from tests.launch.conftest import mount, record
from tests.launch.run_folder.test_checkpoints import write
from tests.launch.study.test_results import last_responses

SETTINGS = Settings(updates=12, keep_checkpoints=2)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, where runs in storage work."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def stored_run(place: Path) -> RunDirectory:
    """A run with checkpoints of the updates 0 and 6, in storage and in the local folder where it works."""
    made = create_run(f"file://{place}")
    made.write_settings(SETTINGS, "cory train")
    for update in range(7):
        made.metrics.append({"update": update})
        if update in (0, 6):
            made.checkpoints.save(update, write)
            made.mirror(keep=2)
    return made


def test_a_run_is_taken_up_from_storage_alone_and_ends_without_a_local_copy(home: Path, tmp_path: Path) -> None:
    place = tmp_path / "storage" / "run"
    run = stored_run(place)
    with pytest.raises(CommandError, match="in use by another run"):
        open_run(f"file://{place}")
    hand_over(run, SETTINGS)
    run.unlock()
    assert not list((home / "cory-rllib" / "runs").iterdir())
    with pytest.raises(CommandError, match=f"holds a run: go on with it by `cory train --resume file://{place}`"):
        create_run(f"file://{place}")
    again = open_run(f"file://{place}")
    assert [line["update"] for line in again.updates()] == list(range(7)) and again.checkpoints.empty()
    again.bring()
    assert again.checkpoints.updates() == [6]
    again.unlock()
    assert RunDirectory.open(place).checkpoints.updates() == [0, 6]  # a path is as good as its URI


def test_a_damaged_checkpoint_in_storage_is_told_of_and_replaced_when_the_run_comes_there_again(
    home: Path, tmp_path: Path
) -> None:
    place = tmp_path / "storage" / "run"
    run = stored_run(place)
    hand_over(run, SETTINGS)
    run.unlock()
    (place / "checkpoints" / "update_000006" / "deep" / "weights").write_text("torn")
    again = open_run(f"file://{place}")
    again.bring()
    assert "update_000006 has a damaged file" in again.checkpoints.set_damaged_aside()[0]
    assert again.checkpoints.updates() == [0]
    again.checkpoints.save(6, write)
    again.mirror(keep=2)
    assert RunDirectory.open(place).checkpoints.choose("6")[0] == 6


def test_storage_that_is_full_or_read_only_keeps_its_state_and_takes_the_rest_later(
    home: Path, tmp_path: Path, disk: Path
) -> None:
    run = stored_run(disk / "run")
    run.checkpoints.save(9, lambda folder: (folder / "weights").write_bytes(b"0" * 4 * 2**20))
    with pytest.raises(StorageError, match=r"run cannot be written: .*No space left on device"):
        run.mirror(keep=3)
    run.unlock()
    mount("-o", "remount,ro", str(disk))
    with pytest.raises(StorageError, match=r"Read-only file system.*the run is in .*`cory train --resume file://"):
        hand_over(run, SETTINGS)
    storage = Storage(f"file://{disk}/run")
    assert storage.updates(storage.names()) == [0, 6]
    mount("-o", "remount,rw,size=16m", str(disk))
    again = open_run(f"file://{disk}/run")  # on the machine that has update 9
    assert RunDirectory.open(disk / "run").checkpoints.choose("latest")[0] == 9
    again.unlock()


def test_a_newer_run_in_storage_wins_over_what_an_older_one_left_on_this_machine(home: Path, tmp_path: Path) -> None:
    place = tmp_path / "storage" / "run"
    stored_run(place).unlock()  # ended without handing over: its local folder is still here
    shutil.rmtree(place)
    elsewhere = record(tmp_path / "elsewhere", SETTINGS, updates=range(4))
    elsewhere.checkpoints.save(3, write)
    Storage(f"file://{place}").push(elsewhere.path, keep=2, best=None)
    again = open_run(f"file://{place}")
    again.bring()
    assert again.checkpoints.updates() == [3] and again.updates() == elsewhere.updates()


def test_a_folder_and_its_uri_are_one_run_that_one_process_trains(home: Path, tmp_path: Path) -> None:
    place = tmp_path / "storage" / "run"
    run = create_run(f"file://{place}")
    run.write_settings(SETTINGS, "cory train")
    run.mirror(keep=2)
    with pytest.raises(CommandError, match=f"^{place} is in use by another run"):
        RunDirectory.create(place)
    run.unlock()
    create_run(f"file://{place}").unlock()  # nothing was saved
    in_folder = RunDirectory.create(place)
    with pytest.raises(CommandError, match=f"^{place} is in use by another run"):
        create_run(f"file://{place}")
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
    with pytest.raises(CommandError, match=f"{run.path} on .* by `cory train --resume file://{place}` on that machine"):
        create_run(f"file://{place}")
    assert run.checkpoints.updates() == [0, 6]
    assert is_begun(f"file://{place}") and not is_begun(f"file://{place}2")
    open_run(f"file://{place}").unlock()
    assert run.checkpoints.updates() == RunDirectory.open(place).checkpoints.updates() == [0, 6]
    shutil.rmtree(run.path)
    assert is_begun(f"file://{place}")


def test_updates_that_were_done_anew_after_a_failure_are_not_lost_where_storage_has_their_first_lines(
    home: Path, tmp_path: Path
) -> None:
    place = tmp_path / "storage" / "run"
    run = stored_run(place)
    for update in (7, 8):
        run.metrics.append({"update": update, "seconds": 1.0})
    run.mirror(keep=2)
    run.cut_after(6)
    for update in (7, 8, 9):
        run.metrics.append({"update": update, "seconds": 2.0})
    run.checkpoints.save(9, write)
    run.unlock()  # storage could not be written until the end
    again = open_run(f"file://{place}")
    assert again.checkpoints.updates() == [0, 6, 9] and len(again.updates()) == 10
    assert RunDirectory.open(place).updates() == again.updates()


def test_a_run_that_failed_before_its_first_checkpoint_is_opened_with_nothing_to_go_on_from(
    home: Path, tmp_path: Path
) -> None:
    uri = f"file://{tmp_path / 'storage' / 'run'}"
    run = create_run(uri)
    run.write_settings(SETTINGS, "cory train")
    run.mirror(keep=2)
    run.unlock()
    again = open_run(uri)
    again.bring()
    assert again.settings() == SETTINGS and again.reached() == -1


def test_a_copy_of_the_metrics_that_was_cut_off_is_of_the_same_run(home: Path, tmp_path: Path) -> None:
    place = tmp_path / "storage" / "run"
    run = stored_run(place)
    run.checkpoints.save(9, write)
    run.unlock()
    (place / "metrics.jsonl").write_bytes(run.metrics.path.read_bytes()[:-5])
    again = open_run(f"file://{place}")
    assert again.checkpoints.updates() == [0, 6, 9]
    assert RunDirectory.open(place).updates() == again.updates() and len(again.updates()) == 7


def test_a_run_of_which_storage_has_only_the_start_is_not_taken_for_another_on_this_machine(
    home: Path, tmp_path: Path
) -> None:
    place = tmp_path / "storage" / "run"
    stored_run(place).unlock()
    shutil.rmtree(place)
    elsewhere = RunDirectory.create(tmp_path / "elsewhere")
    elsewhere.write_settings(SETTINGS, "cory train lr=1e-3")
    elsewhere.metrics.append({"update": 0})
    elsewhere.checkpoints.save(0, write)
    Storage(f"file://{place}").push(elsewhere.path, keep=2, best=None)
    again = open_run(f"file://{place}")
    again.bring()
    assert again.checkpoints.updates() == [0] and "lr=1e-3" in (again.path / "config.yaml").read_text()


def test_what_was_drawn_after_the_last_checkpoint_arrived_is_not_lost_where_storage_failed_then(
    home: Path, tmp_path: Path
) -> None:
    place = tmp_path / "storage" / "run"
    run = stored_run(place)
    run.curves.write_text("drawn")
    run.unlock()
    again = open_run(f"file://{place}")
    assert again.checkpoints.updates() == [0, 6] and again.curves.exists()
    assert RunDirectory.open(place).curves.read_text() == "drawn"
    again.unlock()

    # Another machine goes on, and is killed before its next checkpoint: what it recorded is not written over.
    Journal(place / "metrics.jsonl").append({"update": 7})
    again = open_run(f"file://{place}")
    assert len(again.updates()) == 8 and again.checkpoints.empty()


@pytest.fixture(params=["--resume", "--continue"])
def command(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """`cory train` of what `stored_run` made, if that was to do 6 updates."""
    uri, settings = f"file://{tmp_path / 'storage' / 'run'}", tmp_path / "same.yaml"
    settings.write_text(as_yaml(SETTINGS.model_copy(update={"updates": 6})))
    return (
        ["--resume", uri, "updates=6"]
        if request.param == "--resume"
        else ["-c", str(settings), "--out", uri, "--continue"]
    )


def test_a_run_that_is_done_in_storage_is_told_so_and_leaves_nothing_here(
    home: Path, tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stored_run(tmp_path / "storage" / "run")
    hand_over(run, SETTINGS)
    run.unlock()
    copied: list[str] = []
    get = Storage._get

    def noted(self: Storage, name: str, file: Path, time: int | None = None) -> None:
        copied.append(name)
        get(self, name, file, time)

    monkeypatch.setattr(Storage, "_get", noted)
    assert train.main(command) == 0
    assert "is done: it has all of its 6 updates. To lengthen it: " in capsys.readouterr().out
    own = [name for name in copied if not name.startswith("checkpoints/")]
    assert sorted(own) == ["config.yaml", "metrics.jsonl"]
    assert (copied == own) == (command[0] != "--resume")  # which looks whether it is whole
    assert not list((home / "cory-rllib" / "runs").iterdir())


@pytest.mark.parametrize("missing", ["checkpoints/update_000006", "curves.png"])
def test_a_run_that_is_done_and_never_arrived_whole_is_copied_from_this_machine_and_leaves_it(
    home: Path, tmp_path: Path, command: list[str], missing: str
) -> None:
    place = tmp_path / "storage" / "run"
    run = stored_run(place)
    run.curves.write_text("drawn")
    run.mirror(keep=2)
    run.unlock()
    if missing == run.curves.name:
        (place / missing).unlink()
    else:
        shutil.rmtree(place / missing)
    assert train.main(command) == 0
    assert RunDirectory.open(place).checkpoints.choose("6")[0] == 6 and (place / "curves.png").exists()
    assert not list((home / "cory-rllib" / "runs").iterdir())


@pytest.fixture
def bucket(home: Path, tmp_path: Path, policies_run: RunDirectory) -> Path:
    """Where a run of 6 updates is stored, by a file system that `pyarrow` does not know for this machine's own."""
    place = tmp_path / "bucket" / "run"
    Storage(uri_of(place)).push(policies_run.path, keep=2, best=5)
    return place


def uri_of(place: Path) -> str:
    return f"fsspec+file://{place}"


def test_a_run_in_storage_is_read_as_its_folder_is_and_copied_once(
    bucket: Path, policies_run: RunDirectory, home: Path
) -> None:
    stored, own = open_trained(uri_of(bucket)), open_trained(policies_run.path)
    assert (stored.update, stored.settings, stored.lines) == (5, own.settings, own.lines)
    for name, array in own.weights("llm_2").items():
        np.testing.assert_array_equal(stored.weights("llm_2")[name], array)
    assert home in stored.folder.parents and not list(stored.folder.glob("algorithm_state*"))
    assert not list(stored.run.checkpoints.place(6).iterdir())
    for weights in (bucket / "checkpoints" / "update_000005").rglob(STATE):
        weights.unlink()
    assert open_trained(uri_of(bucket)).weights("llm_1").keys() == own.weights("llm_1").keys()
    assert read_run(f"file://{bucket}").path == bucket  # needs no copy


def test_a_report_of_a_run_in_storage_has_its_samples_last_figures_and_evaluations(home: Path, tmp_path: Path) -> None:
    settings = Settings(updates=6)
    run = record(tmp_path / "run", settings, updates=range(7))
    sampled(run, 5, "a wonderful film")
    final.write(run.final, {**last_responses(settings, 4), "update": 6})
    evaluated(run)
    run.checkpoints.save(6, write)
    run.unlock()
    bucket, uri = tmp_path / "bucket" / "run", uri_of(tmp_path / "bucket" / "run")
    Storage(uri).push(run.path, keep=1, best=None)
    assert not read_run(uri).samples.read()  # whoever watches it needs none
    own, stored = report_of(run.path, "run"), report_of(uri, "run")
    assert stored == own and own.result.final and own.result.final["queries"] == 4
    assert own.result.samples and [found.name for found in stored.evaluations] == ["best-1234"]

    shutil.rmtree(bucket / "evaluation")
    (bucket / "final.json").unlink()
    stored = report_of(uri, "run")
    assert stored.result.samples and not stored.evaluations
    assert stored.result.final and stored.result.final["queries"] == 0  # not known


def test_commands_take_the_uri_of_a_run(
    bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    uri = uri_of(bucket)
    assert plot.main([uri]) == 0
    assert capsys.readouterr().out == "run-curves.png\n" and (tmp_path / "run-curves.png").stat().st_size > 5_000
    assert generate.main([uri, "This movie", "--roles", "llm_2", "--checkpoint", "6"]) == 0
    output, errors = capsys.readouterr()
    assert "pioneer (llm_2): " in output and f"llm_2, after update 6 of {uri}" in errors
    assert export.main([uri, "--policy", "llm_1", "--out", "model"]) == 0
    assert "model: llm_1 after update 5, fp32" in capsys.readouterr().out
    assert watch.main([uri, "--once"]) == 0
    assert "Update 6 of 6" in capsys.readouterr().out
    found = _run_in(uri)
    assert found is not None and found.checkpoints.choose("latest", POLICIES)[0] == 6


def test_what_storage_lacks_is_told_by_its_uri(bucket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri = uri_of(bucket)
    with pytest.raises(
        CommandError, match=rf"^{re.escape(uri)}/checkpoints has no checkpoint `1`\. It has: best \(5\), latest "
    ):
        open_trained(uri, "1")
    weights = bucket / "checkpoints" / "update_000006" / POLICIES / "llm_1" / STATE
    weights.write_bytes(b"torn")
    with pytest.raises(
        CommandError, match=rf"^{re.escape(uri)}/checkpoints/update_000006 has a damaged file .*--checkpoint: best"
    ):
        open_trained(uri, "6")
    with pytest.raises(CommandError, match=rf"^{re.escape(uri)} has no policy `llm_3`"):
        open_trained(uri, "5").check_policies(["llm_3"])
    with pytest.raises(CommandError, match=rf"{re.escape(uri)}x is not a run's folder"):
        read_run(f"{uri}x")
    with pytest.raises(CommandError, match="holds a password"):
        read_run("s3://me:word@bucket/run")
    assert watch.main(["ftp://host/run"]) == 2
    assert capsys.readouterr().err.startswith("Error: ftp://host/run is no place for a run")


def begun_in_storage(folder: Path) -> tuple[RunDirectory, list[Update], Storage]:
    """A run of 12 updates of which storage has 3, with all the lines of its metrics."""
    run = record(folder / "run", SETTINGS, updates=range(4))
    storage = Storage(uri_of(folder / "bucket" / "run"))
    storage.push(run.path, keep=2, best=None)
    return run, record(folder / "later", SETTINGS).updates(), storage


def test_a_run_in_storage_is_watched_until_it_is_done_although_nothing_on_this_machine_trains_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, later, storage = begun_in_storage(tmp_path)

    def train(seconds: float) -> None:
        """What happens between two looks."""
        assert seconds == watch.STORAGE_SECONDS
        for line in later[len(run.updates()) :][:4]:
            run.metrics.append(line)
        storage.push(run.path, keep=2, best=None)

    monkeypatch.setattr("launch.commands.watch.time.sleep", train)
    assert watch.main([storage.uri]) == 0
    output = capsys.readouterr().out
    assert [line.split("/")[0].strip() for line in output.splitlines() if "llm_" in line and "/12" in line] == [
        str(update) for update in range(1, 13)
    ]
    assert "process" not in output and output.endswith("done\n")


def test_who_watches_a_run_gets_past_storage_that_cannot_be_read_for_a_while(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, later, storage = begun_in_storage(tmp_path)
    refresh = Storage.refresh
    looks: list[Path] = []

    def shaky(self: Storage, folder: Path, patterns: Sequence[str]) -> None:
        looks.append(folder)
        if len(looks) in (2, 3):
            raise StorageError("The bucket cannot be read: no network.")
        if len(looks) == 4:
            for line in later[4:]:
                run.metrics.append(line)
            storage.push(run.path, keep=2, best=None)
        refresh(self, folder, patterns)

    monkeypatch.setattr(Storage, "refresh", shaky)
    monkeypatch.setattr(watch, "STORAGE_SECONDS", 0.0)
    monkeypatch.setattr("launch.console.patience.PATIENCE", 0.0)
    assert watch.main([storage.uri]) == 2
    assert "Error: The bucket cannot be read: no network." in capsys.readouterr().err
    looks.clear()
    monkeypatch.setattr("launch.console.patience.PATIENCE", 60.0)
    assert watch.main([storage.uri]) == 0
    output = capsys.readouterr().out
    assert output.count("Warning: The bucket cannot be read: no network. Looking again for a minute.\n") == 1
    assert output.endswith("done\n")
