"""A run in storage that no lock reaches: one process trains it, and a killed one keeps nobody out for long."""

import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launch.commands.train import _find
from launch.run_folder import lease
from launch.run_folder.directory import RunDirectory
from launch.run_folder.lease import Held, Lease, Lost
from launch.run_folder.mirror import create_run, discard, hand_over, open_run
from launch.run_folder.storage import Storage
from tests.launch.conftest import ENVIRONMENT
from tests.launch.run_folder.conftest import SETTINGS, on_another_machine, stored_run
from tests.launch.run_folder.test_checkpoints import write

HOLD = """
import sys
from launch.run_folder.mirror import open_run

run = open_run(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def place(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a run is stored, by a file system that `pyarrow` does not know for this machine's own."""
    monkeypatch.setattr(lease, "SETTLED", 0.3)
    return tmp_path / "bucket" / "run"


def uri_of(place: Path) -> str:
    return f"fsspec+file://{place}"


def stored(place: Path) -> RunDirectory:
    return stored_run(place, scheme="fsspec+file")


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
    with on_another_machine(tmp_path), pytest.raises(Held, match=f"run is {said}.* If it was killed, try again in 1"):
        open_run(uri_of(place))
    run.checkpoints.save(9, write)
    run.mirror(keep=2)
    run.unlock()
    with on_another_machine(tmp_path):
        other = open_run(uri_of(place))  # at once
        assert other.reached() == 9
        other.unlock()


def test_a_run_that_begins_is_refused_where_another_has_begun_and_saved_nothing_yet(
    place: Path, tmp_path: Path
) -> None:
    run = create_run(uri_of(place))
    with on_another_machine(tmp_path), pytest.raises(Held):
        create_run(uri_of(place))
    run.write_settings(SETTINGS, "cory train")
    run.mirror(keep=2)
    discard(run)
    assert not list(place.iterdir()) and not run.path.exists()


def test_a_killed_process_keeps_its_own_machine_out_not_at_all_and_others_for_a_while(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    process = killed_holder(place)
    with on_another_machine(tmp_path), pytest.raises(Held, match=f"process {process} on"):
        open_run(uri_of(place))
    run = open_run(uri_of(place))
    assert run.checkpoints.updates() == [0, 6]
    run.unlock()
    place = place.with_name("another")
    killed_holder(place)
    with on_another_machine(tmp_path):
        monkeypatch.setattr(lease, "STALE", 3.0)
        other = _find(uri_of(place))  # `--continue`, where nobody may be there to ask again
        assert other is not None and other.reached() == 6
        other.unlock()
    assert capsys.readouterr().err.count("Warning: ") == 1


def test_who_was_not_heard_of_and_lost_a_run_writes_nothing_more_there_and_keeps_what_it_has(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stored(place)
    monkeypatch.setattr(lease, "STALE", 0.0)
    with on_another_machine(tmp_path):
        other = open_run(uri_of(place))
        other.metrics.append({"update": 7})
        other.mirror(keep=2)
    before = (place / "metrics.jsonl").read_bytes()
    run.metrics.append({"update": 7, "seconds": 1.0})
    said = rf"was taken over by process {os.getpid()} on .* What this one did is in {run.path} on "
    with pytest.raises(Lost, match=said):
        run.mirror(keep=2)
    with pytest.raises(Exception, match=said):
        hand_over(run, SETTINGS)
    run.unlock()
    assert (place / "metrics.jsonl").read_bytes() == before and len(run.updates()) == 8
    other.mirror(keep=2)  # who lost the lease gave back none
    other.unlock()


def test_a_lease_is_renewed_between_two_saves(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEWED", 0.1)
    run = stored(place)
    began, until = time.time(), time.monotonic() + 30
    while json.loads((place / ".lease").read_text())["time"] < began + 1:
        assert time.monotonic() < until
        time.sleep(0.1)
    run.unlock()
    assert json.loads((place / ".lease").read_text())["time"] == 0


def test_of_several_that_take_a_free_lease_at_once_one_has_it(place: Path, tmp_path: Path) -> None:
    def take(number: int) -> Lease | None:
        folder = tmp_path / str(number)
        folder.mkdir()
        found = Lease(Storage(uri_of(place)), folder)
        with contextlib.suppress(Held):
            found.take(locked=False)
            return found
        return None

    with ThreadPoolExecutor(6) as at_once:
        (winner,) = filter(None, at_once.map(take, range(6)))
    winner.renew()
    winner.release()


def test_a_run_that_is_handed_over_leaves_no_lease(place: Path) -> None:
    run = stored(place)
    hand_over(run, SETTINGS)
    assert not (place / ".lease").exists() and not run.path.exists()
    assert RunDirectory.open(place).checkpoints.updates() == [0, 6]
