"""Leases: one process trains a run in storage without locks, and others can take over soon after a kill."""

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
from tests.launch.conftest import ENVIRONMENT, Cory, start_cory
from tests.launch.run_folder.conftest import SETTINGS, on_another_machine, stored_run
from tests.launch.run_folder.test_checkpoints import write_checkpoint
from tests.launch.training.test_training import BREVITY, SMALL, updates_in

HOLD = """
import sys
from launch.run_folder.run import Run

run = Run.open(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(home: Path, tmp_path: Path) -> Path:
    """Folder of a stored run, accessed through a file system that `pyarrow` does not treat as local."""
    return tmp_path / "bucket" / "run"


def uri_of(path: Path) -> str:
    return f"fsspec+file://{path}"


def stored(path: Path, upload: bool = True) -> Run:
    return stored_run(path, scheme="fsspec+file", upload=upload)


def killed_holder(path: Path) -> int:
    """Starts a process that opens a run, kills it, and returns its process id."""
    stored(path).unlock()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, uri_of(path)],
        env={**ENVIRONMENT, "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stdout.readline() == "held\n"
    process.kill()
    process.communicate()
    return process.pid


def test_a_run_trained_by_another_machine_is_rejected_with_its_process(path: Path, tmp_path: Path) -> None:
    run = stored(path)
    message = (
        rf"in use by another run \(process {os.getpid()} on {platform.node()}, last heartbeat \d s ago\)\. Stop it, or "
    )
    with (
        on_another_machine(tmp_path),
        pytest.raises(LeaseHeldError, match=f"run is {message}.* If it was killed, try again in 1"),
    ):
        Run.open(uri_of(path))
    run.checkpoints.save(9, write_checkpoint)
    run.upload()
    run.unlock()
    with on_another_machine(tmp_path):
        other = Run.open(uri_of(path))  # without waiting
        assert other.latest_checkpoint() == 9
        other.unlock()


def test_a_new_run_is_rejected_if_another_has_started_without_a_checkpoint_yet(path: Path, tmp_path: Path) -> None:
    run = Run.create(uri_of(path))
    with on_another_machine(tmp_path), pytest.raises(LeaseHeldError):
        Run.create(uri_of(path))
    run.write_settings(SETTINGS, "cory train")
    run.upload()
    run.abort()
    assert not list(path.iterdir()) and not run.path.exists()


def test_after_a_kill_the_same_machine_resumes_at_once_and_others_after_a_while(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    process = killed_holder(path)
    with on_another_machine(tmp_path), pytest.raises(LeaseHeldError, match=f"process {process} on"):
        Run.open(uri_of(path))
    run = Run.open(uri_of(path))
    assert run.checkpoints.updates() == [0, 6]
    run.unlock()
    path = path.with_name("another")
    killed_holder(path)
    with on_another_machine(tmp_path):
        monkeypatch.setattr(lease, "STALE", 3.0)
        other = _find_run(uri_of(path))  # `--continue` retries, as in unattended jobs
        assert other is not None and other.latest_checkpoint() == 6
        other.unlock()
    assert capsys.readouterr().err.count("Warning: ") == 1


def test_a_process_that_lost_its_lease_writes_nothing_more_to_storage_and_keeps_its_local_files(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stored(path)
    monkeypatch.setattr(lease, "STALE", 0.0)
    with on_another_machine(tmp_path):
        other = Run.open(uri_of(path))
        other.metrics.append({"update": 7})
        other.upload()
    before = (path / "metrics.jsonl").read_bytes()
    run.metrics.append({"update": 7, "seconds": 1.0})
    message = rf"was taken over by process {os.getpid()} on .* This process's results are in {run.path} on "
    with pytest.raises(LeaseLostError, match=message):
        run.upload()
    with pytest.raises(Exception, match=message):
        run.finalize_upload()
    run.unlock()
    assert (path / "metrics.jsonl").read_bytes() == before and len(run.updates()) == 8
    other.upload()  # the process that lost the lease did not release it
    other.unlock()


def test_a_lease_has_heartbeats_between_two_saves(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.1)
    run = stored(path)
    start, deadline = time.time(), time.monotonic() + 30
    while json.loads((path / ".lease").read_text())["time"] < start + 1:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    run.unlock()
    assert not (path / ".lease").exists()


def test_if_two_processes_take_a_free_run_at_once_the_first_writer_stops_at_its_next_upload(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Lease, "_owner", lambda self: None)  # each reads the lease before the other has written it
        run = stored(path, upload=False)
        with on_another_machine(tmp_path):
            other = Run.create(uri_of(path))
            other.write_settings(SETTINGS, "cory train")
    before = sorted(path.name for path in path.rglob("*"))
    with pytest.raises(LeaseLostError, match="was taken over by process"):
        run.upload()
    assert sorted(path.name for path in path.rglob("*")) == before
    other.upload()
    for lease_holder in (run, other):
        lease_holder.unlock()


def test_if_two_processes_take_a_free_run_at_once_the_first_writer_is_rejected_if_it_sees_the_other_lease(
    path: Path, tmp_path: Path
) -> None:
    class Overtaken(Storage):
        def write(self, name: str, content: bytes) -> None:
            super().write(name, content)
            super().write(name, other)

    other = json.dumps(lease.Owner("another", "elsewhere", 1, time.time())._asdict()).encode()
    with pytest.raises(LeaseHeldError, match="in use by another run"), Lease(Overtaken(uri_of(path)), tmp_path):
        pass
    assert (path / ".lease").read_bytes() == other


def test_aborting_a_run_that_was_taken_over_does_not_remove_the_other_process_s_upload(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Lease, "_owner", lambda self: None)  # each reads the lease before the other has written it
        run = Run.create(uri_of(path))
        with on_another_machine(tmp_path):
            other = Run.create(uri_of(path))
    for lease_holder in (other, run):
        lease_holder.write_settings(SETTINGS, "cory train")
    other.upload()
    with pytest.raises(LeaseLostError):
        run.upload()
    run.abort()
    assert (path / "config.yaml").exists() and (path / "run.id").read_bytes() == other.read("run.id")
    assert not run.path.exists()
    other.upload()
    other.unlock()


def test_a_process_that_lost_its_lease_writes_nothing_even_if_the_new_owner_has_ended(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stored(path)
    with on_another_machine(tmp_path), monkeypatch.context() as later:
        later.setattr(lease, "STALE", 0.0)
        other = Run.open(uri_of(path))
        other.metrics.append({"update": 7})
        other.finalize_upload()
    before = (path / "metrics.jsonl").read_bytes()
    run.metrics.append({"update": 7, "seconds": 1.0})
    with pytest.raises(LeaseLostError, match="was taken over by another process"):
        run.upload()
    run.unlock()
    assert (path / "metrics.jsonl").read_bytes() == before


def test_a_finalized_upload_leaves_no_lease(path: Path) -> None:
    run = stored(path)
    run.finalize_upload()
    assert not (path / ".lease").exists() and not run.path.exists()
    assert Run.open(path).checkpoints.updates() == [0, 6]


@pytest.mark.slow
def test_the_same_command_on_another_machine_resumes_a_run_whose_machine_was_lost(
    path: Path, cory: Cory, tmp_path: Path
) -> None:
    (tmp_path / "my_rewards.py").write_text(BREVITY)
    words = ("train", *SMALL, "num_updates=4", "checkpoint_every=1", "--out", uri_of(path), "--continue")
    process = start_cory(tmp_path, *words, XDG_CACHE_HOME=str(tmp_path / "one"))
    assert process.stdout and process.stderr
    for line in process.stdout:
        if line.lstrip().startswith("3/4"):
            break
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    record = json.loads((path / ".lease").read_text())
    (path / ".lease").write_text(json.dumps({**record, "time": record["time"] - 2 * lease.STALE}))
    again = cory(*words, XDG_CACHE_HOME=str(tmp_path / "another"))
    assert again.returncode == 0 and "(resuming after update " in again.stdout, again.stderr
    assert updates_in(path / "metrics.jsonl") == [0, 1, 2, 3, 4] and Run.open(path).checkpoints.choose("4")
    assert not (path / ".lease").exists() and not list((tmp_path / "another" / "cory-rllib" / "runs").iterdir())
    done = cory(*words, XDG_CACHE_HOME=str(tmp_path / "one"))
    assert done.returncode == 0 and "is done: all 4 updates are completed" in done.stdout
