"""A run's folder in storage: whole there at every moment, and all that a run needs to go on elsewhere."""

import shutil
from pathlib import Path

import pytest
from pyarrow.fs import FileSystem, LocalFileSystem, _MockFileSystem

from launch.command import CommandError
from launch.run_directory import RunDirectory
from launch.storage import Storage, StorageError, check_place, create_run, hand_over, open_run
from policies.settings import Settings
from tests.launch.conftest import mount, record
from tests.launch.test_checkpoints import write

SETTINGS = Settings(updates=12, keep_checkpoints=2)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with checkpoints of the updates 3, 6, 9 and 12; 6 and 12 were evaluated, and 12 is better."""
    made = record(tmp_path / "run", SETTINGS)
    for update in (3, 6, 9, 12):
        made.checkpoints.save(update, write)
    made.unlock()
    return made


@pytest.fixture(params=["mock", "local"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    files: FileSystem = _MockFileSystem() if request.param == "mock" else LocalFileSystem()
    base = "bucket/run" if request.param == "mock" else str(tmp_path / "storage" / "run")
    return Storage("test://bucket/run", (files, base))


def checkpoints_in(storage: Storage) -> list[int]:
    return storage.updates(storage.names())


def test_what_was_pushed_is_fetched_with_the_latest_checkpoint_alone(
    run: RunDirectory, storage: Storage, tmp_path: Path
) -> None:
    storage.push(run.path, keep=2, best=3)
    assert checkpoints_in(storage) == [3, 9, 12]
    fetched = RunDirectory(tmp_path / "elsewhere")
    storage.fetch(fetched.path)
    assert fetched.settings() == SETTINGS and fetched.updates() == run.updates()
    assert fetched.checkpoints.updates() == [12] and fetched.checkpoints.choose(None)[0] == 12

    # The other machine goes on: the best one stays although it never came here, what is older than two goes.
    fetched.checkpoints.save(15, write)
    fetched.metrics.append({"update": 15})
    storage.push(fetched.path, keep=2, best=3)
    assert checkpoints_in(storage) == [3, 12, 15]
    assert not [name for name in storage.names() if "update_000009" in name or name.endswith(".part")]


def test_a_copy_that_breaks_off_anywhere_leaves_only_whole_checkpoints_with_their_metrics(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Storage._store
    for limit in range(100):
        storage = Storage("test://run", (LocalFileSystem(), str(tmp_path / f"storage{limit}")))
        left = [limit]

        def store(self: Storage, name: str, source: object, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise StorageError("the network is gone")
            stored(self, name, source)  # type: ignore[arg-type]

        monkeypatch.setattr(Storage, "_store", store)
        try:
            storage.push(run.path, keep=4, best=None)
        except StorageError:
            pass
        else:
            break
        fetched = RunDirectory(tmp_path / f"fetched{limit}")
        storage.fetch(fetched.path)
        for update in fetched.checkpoints.updates():
            assert fetched.checkpoints.choose(str(update))[0] == update
            assert [line["update"] for line in fetched.updates()] == list(range(13))
    assert 10 <= limit < 99
    assert checkpoints_in(storage) == [3, 6, 9, 12]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, where runs in storage work."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def stored_run(place: Path) -> RunDirectory:
    """A run with checkpoints of the updates 0 and 6, in storage and in the local folder where it works."""
    made = create_run(f"file://{place}")
    made.write_settings(SETTINGS, "cory train")
    for update in (0, 6):
        made.metrics.append({"update": update})
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
    assert [line["update"] for line in again.updates()] == [0, 6] and again.checkpoints.updates() == [6]
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
    mount("-o", "remount,ro", str(disk))
    with pytest.raises(StorageError, match=r"Read-only file system.*the run is in .*`cory train --resume file://"):
        hand_over(run, SETTINGS)
    storage = Storage(f"file://{disk}/run")
    assert storage.updates(storage.names()) == [0, 6]
    run.unlock()
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
    assert again.checkpoints.updates() == [3] and again.updates() == elsewhere.updates()


def test_places_that_would_vanish_or_show_a_password_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_place("runs/here")
    with pytest.raises(CommandError, match="holds a password") as raised:
        check_place("s3://me:hunter2@bucket/run")
    assert "hunter2" not in str(raised.value)
    with pytest.raises(CommandError, match="is no place for a run"):
        Storage("ftp://host/run")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    check_place("/shared/run")
    check_place("gs://bucket/run")
    with pytest.raises(CommandError, match="would vanish with the job's working directory"):
        check_place("runs/here")
