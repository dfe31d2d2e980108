"""A run in storage that no lock reaches: one process trains it, and a killed one keeps nobody out for long."""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.commands.train import _find_run
from launch.run_folder import lease
from launch.run_folder.lease import Lease, LeaseHeldError, LeaseLostError
from launch.run_folder.run import Run
from launch.run_folder.storage import Storage
from tests.launch.conftest import ENVIRONMENT, Cory, begin
from tests.launch.run_folder.conftest import SETTINGS, on_another_machine, stored_run
from tests.launch.run_folder.test_checkpoints import write
from tests.launch.training.test_training import BREVITY, SMALL, updates_in

HOLD = """
import sys
from launch.run_folder.run import Run

run = Run.open(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def place(home: Path, tmp_path: Path) -> Path:
    """Where a run is stored, by a file system that `pyarrow` does not know for this machine's own."""
    return tmp_path / "bucket" / "run"


def uri_of(place: Path) -> str:
    return f"fsspec+file://{place}"


def stored(place: Path, upload: bool = True) -> Run:
    return stored_run(place, scheme="fsspec+file", upload=upload)


def killed_holder(place: Path) -> int:
    """Lets a process open a run, kills it, and returns its number."""
    stored(place).unlock()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, uri_of(place)],
        env={**ENVIRONMENT, "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stdout.readline() == "held\n"
    process.kill()
    process.communicate()
    return process.pid


def test_a_run_that_another_machine_trains_is_refused_with_who_does(place: Path, tmp_path: Path) -> None:
    run = stored(place)
    said = rf"in use by another run \(process {os.getpid()} on {platform.node()}, heard of \d s ago\)\. Stop it, or "
    with (
        on_another_machine(tmp_path),
        pytest.raises(LeaseHeldError, match=f"run is {said}.* If it was killed, try again in 1"),
    ):
        Run.open(uri_of(place))
    run.checkpoints.save(9, write)
    run.upload()
    run.unlock()
    with on_another_machine(tmp_path):
        other = Run.open(uri_of(place))  # at once
        assert other.latest_checkpoint() == 9
        other.unlock()


def test_a_run_that_begins_is_refused_where_another_has_begun_and_saved_nothing_yet(
    place: Path, tmp_path: Path
) -> None:
    run = Run.create(uri_of(place))
    with on_another_machine(tmp_path), pytest.raises(LeaseHeldError):
        Run.create(uri_of(place))
    run.write_settings(SETTINGS, "cory train")
    run.upload()
    run.abort()
    assert not list(place.iterdir()) and not run.path.exists()


def test_a_killed_process_keeps_its_own_machine_out_not_at_all_and_others_for_a_while(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    process = killed_holder(place)
    with on_another_machine(tmp_path), pytest.raises(LeaseHeldError, match=f"process {process} on"):
        Run.open(uri_of(place))
    run = Run.open(uri_of(place))
    assert run.checkpoints.updates() == [0, 6]
    run.unlock()
    place = place.with_name("another")
    killed_holder(place)
    with on_another_machine(tmp_path):
        monkeypatch.setattr(lease, "STALE", 3.0)
        other = _find_run(uri_of(place))  # `--continue`, where nobody may be there to ask again
        assert other is not None and other.latest_checkpoint() == 6
        other.unlock()
    assert capsys.readouterr().err.count("Warning: ") == 1


def test_who_was_not_heard_of_and_lost_a_run_writes_nothing_more_there_and_keeps_what_it_has(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stored(place)
    monkeypatch.setattr(lease, "STALE", 0.0)
    with on_another_machine(tmp_path):
        other = Run.open(uri_of(place))
        other.metrics.append({"update": 7})
        other.upload()
    before = (place / "metrics.jsonl").read_bytes()
    run.metrics.append({"update": 7, "seconds": 1.0})
    said = rf"was taken over by process {os.getpid()} on .* What this one did is in {run.path} on "
    with pytest.raises(LeaseLostError, match=said):
        run.upload()
    with pytest.raises(Exception, match=said):
        run.finalize_upload()
    run.unlock()
    assert (place / "metrics.jsonl").read_bytes() == before and len(run.updates()) == 8
    other.upload()  # who lost the lease gave back none
    other.unlock()


def test_a_lease_is_renewed_between_two_saves(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEWED", 0.1)
    run = stored(place)
    began, until = time.time(), time.monotonic() + 30
    while json.loads((place / ".lease").read_text())["time"] < began + 1:
        assert time.monotonic() < until
        time.sleep(0.1)
    run.unlock()
    assert not (place / ".lease").exists()


def test_of_two_that_take_a_free_run_at_once_the_one_that_wrote_first_stops_at_its_next_upload(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as unseen:
        unseen.setattr(Lease, "_owner", lambda self: None)  # each has looked before the other has written
        run = stored(place, upload=False)
        with on_another_machine(tmp_path):
            other = Run.create(uri_of(place))
            other.write_settings(SETTINGS, "cory train")
    before = sorted(path.name for path in place.rglob("*"))
    with pytest.raises(LeaseLostError, match="was taken over by process"):
        run.upload()
    assert sorted(path.name for path in place.rglob("*")) == before
    other.upload()
    for one in (run, other):
        one.unlock()


def test_of_two_that_take_a_free_run_at_once_the_one_that_wrote_first_is_refused_if_it_sees_the_other_s_record(
    place: Path, tmp_path: Path
) -> None:
    class Overtaken(Storage):
        def write(self, name: str, content: bytes) -> None:
            super().write(name, content)
            super().write(name, other)

    other = json.dumps(lease.Owner("another", "elsewhere", 1, time.time())._asdict()).encode()
    with pytest.raises(LeaseHeldError, match="in use by another run"), Lease(Overtaken(uri_of(place)), tmp_path):
        pass
    assert (place / ".lease").read_bytes() == other


def test_who_lost_a_run_before_anything_was_recorded_does_not_remove_what_the_other_has_uploaded(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as unseen:
        unseen.setattr(Lease, "_owner", lambda self: None)  # each has looked before the other has written
        run = Run.create(uri_of(place))
        with on_another_machine(tmp_path):
            other = Run.create(uri_of(place))
    for one in (other, run):
        one.write_settings(SETTINGS, "cory train")
    other.upload()
    with pytest.raises(LeaseLostError):
        run.upload()
    run.abort()
    assert (place / "config.yaml").exists() and (place / "run.id").read_bytes() == other.read("run.id")
    assert not run.path.exists()
    other.upload()
    other.unlock()


def test_who_lost_a_run_that_has_ended_meanwhile_writes_nothing_there(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stored(place)
    with on_another_machine(tmp_path), monkeypatch.context() as later:
        later.setattr(lease, "STALE", 0.0)
        other = Run.open(uri_of(place))
        other.metrics.append({"update": 7})
        other.finalize_upload()
    before = (place / "metrics.jsonl").read_bytes()
    run.metrics.append({"update": 7, "seconds": 1.0})
    with pytest.raises(LeaseLostError, match="was taken over by another process"):
        run.upload()
    run.unlock()
    assert (place / "metrics.jsonl").read_bytes() == before


def test_a_run_that_is_handed_over_leaves_no_lease(place: Path) -> None:
    run = stored(place)
    run.finalize_upload()
    assert not (place / ".lease").exists() and not run.path.exists()
    assert Run.open(place).checkpoints.updates() == [0, 6]


@pytest.mark.slow
def test_a_run_whose_machine_is_lost_is_continued_by_the_same_command_on_another(
    place: Path, cory: Cory, tmp_path: Path
) -> None:
    (tmp_path / "my_rewards.py").write_text(BREVITY)
    words = ("train", *SMALL, "num_updates=4", "checkpoint_every=1", "--out", uri_of(place), "--continue")
    process = begin(tmp_path, *words, XDG_CACHE_HOME=str(tmp_path / "one"))
    assert process.stdout and process.stderr
    for line in process.stdout:
        if line.lstrip().startswith("3/4"):
            break
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    record = json.loads((place / ".lease").read_text())
    (place / ".lease").write_text(json.dumps({**record, "time": record["time"] - 2 * lease.STALE}))
    again = cory(*words, XDG_CACHE_HOME=str(tmp_path / "another"))
    assert again.returncode == 0 and "(resuming after update " in again.stdout, again.stderr
    assert updates_in(place / "metrics.jsonl") == [0, 1, 2, 3, 4] and Run.open(place).checkpoints.choose("4")
    assert not (place / ".lease").exists() and not list((tmp_path / "another" / "cory-rllib" / "runs").iterdir())
    done = cory(*words, XDG_CACHE_HOME=str(tmp_path / "one"))
    assert done.returncode == 0 and "is done: all 4 updates are completed" in done.stdout
