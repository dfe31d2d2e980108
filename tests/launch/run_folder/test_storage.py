"""A run's folder in storage: whole there at every moment, and what is copied from there."""

import io
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from pyarrow.fs import FileSystem, LocalFileSystem, _MockFileSystem

from launch.console.errors import CommandError
from launch.run_folder.directory import RunDirectory
from launch.run_folder.storage import REPORTED, Storage, StorageError, check_place
from policies.settings.settings import Settings
from tests.launch.conftest import record
from tests.launch.run_folder.test_checkpoints import write

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
    assert not fetched.checkpoints.updates()
    storage.fetch_checkpoint(fetched.path)
    assert fetched.checkpoints.updates() == [12] and fetched.checkpoints.choose(None)[0] == 12

    # The other machine goes on: the best one stays although it never came here, what is older than two goes.
    fetched.checkpoints.save(15, write)
    fetched.metrics.append({"update": 15})
    storage.push(fetched.path, keep=2, best=3)
    assert checkpoints_in(storage) == [3, 12, 15]
    assert not [name for name in storage.names() if "update_000009" in name or name.endswith(".part")]


def test_a_copy_to_look_at_has_a_checkpoints_part_when_it_is_asked_for_and_follows_what_changes_there(
    run: RunDirectory, storage: Storage, tmp_path: Path
) -> None:
    storage.push(run.path, keep=2, best=6)
    copy = RunDirectory(tmp_path / "copy")
    storage.refresh(copy.path)
    assert copy.settings() == SETTINGS and copy.updates() == run.updates()
    assert copy.checkpoints.updates() == [6, 9, 12] and not list(copy.path.rglob("weights"))

    chosen = copy.checkpoints.place(9)
    storage.bring(chosen, "other")
    assert [file.name for file in chosen.iterdir()] == ["manifest.json"]
    storage.bring(chosen, "deep/")
    assert copy.checkpoints.choose("9")[0] == 9
    (chosen / "deep" / "weights").write_text("torn here")
    storage.bring(chosen, "deep/")
    assert copy.checkpoints.choose("9")[0] == 9

    # The run was set back and does update 9 anew; 12 is gone.
    shutil.rmtree(run.checkpoints.place(9))
    shutil.rmtree(run.checkpoints.place(12))
    run.checkpoints.save(9, lambda folder: write(folder, "new"))
    run.cut_after(9)
    storage.clear()
    storage.push(run.path, keep=2, best=6)
    storage.refresh(copy.path)
    assert copy.checkpoints.updates() == [6, 9] and [line["update"] for line in copy.updates()] == list(range(10))
    storage.bring(chosen, "deep/")
    assert (chosen / "deep" / "weights").read_text() == "new"


def test_keys_that_would_leave_the_folder_are_no_files_of_the_run(run: RunDirectory, tmp_path: Path) -> None:
    files = _MockFileSystem()
    storage = Storage("test://bucket/run", (files, "bucket/run"))
    storage.push(run.path, keep=2, best=None)
    for key in (
        "evaluation/../../out/evaluation.json",
        "checkpoints/update_000012/../../../out/weights",
        "../out/log.txt",
    ):
        files.create_dir(f"bucket/run/{key.rpartition('/')[0]}", recursive=True)
        with files.open_output_stream(f"bucket/run/{key}") as stream:
            stream.write(b"evil")
    copy = tmp_path / "deep" / "copy"
    storage.fetch(copy)
    storage.fetch_checkpoint(copy)
    storage.refresh(copy, REPORTED)
    storage.bring(copy / "checkpoints" / "update_000012", "")
    assert [entry.name for entry in (tmp_path / "deep").iterdir()] == ["copy"]
    assert not [file for file in copy.rglob("*") if file.is_file() and file.read_bytes() == b"evil"]


def test_a_star_in_a_pattern_stands_for_one_folder(run: RunDirectory, storage: Storage, tmp_path: Path) -> None:
    for place in ("best-1234", "mine/best-5678"):
        (run.path / "evaluation" / place).mkdir(parents=True)
        (run.path / "evaluation" / place / "evaluation.json").write_text("{}")
    storage.push(run.path, keep=2, best=None)
    storage.refresh(tmp_path / "copy", REPORTED)
    assert [file.parent.name for file in (tmp_path / "copy").rglob("evaluation.json")] == ["best-1234"]


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
        storage.fetch_checkpoint(fetched.path)
        for update in fetched.checkpoints.updates():
            assert fetched.checkpoints.choose(str(update))[0] == update
            assert [line["update"] for line in fetched.updates()] == list(range(13))
    assert 10 <= limit < 99
    assert checkpoints_in(storage) == [3, 6, 9, 12]


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Storage:
    """An object store: a file there is written directly."""
    monkeypatch.setattr("launch.run_folder.storage.OBJECT_STORES", ("mock",))
    files = _MockFileSystem()
    files.create_dir("bucket/run/checkpoints/update_000003", recursive=True)
    return Storage("test://bucket/run", (files, "bucket/run"))


class Interrupted(io.BytesIO):
    """A file during whose second piece something happens."""

    def __init__(self, content: bytes, happen: Callable[[], object]) -> None:
        super().__init__(content)
        self._happen = happen

    def read(self, size: int | None = -1, /) -> bytes:
        """Reads half of the file at most, unless all is wanted at once."""
        piece = super().read(size if size in (None, -1) else len(self.getvalue()) // 2)
        if self.tell() > len(self.getvalue()) // 2:
            self._happen()
        return piece


def fail() -> None:
    raise OSError(5, os.strerror(5))


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/update_000003/weights"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_file_is_copied_to_an_object_store_leaves_it_whole(
    objects: Storage, name: str, number: signal.Signals
) -> None:
    usual = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            objects._store(name, Interrupted(b"whole", lambda: signal.raise_signal(number)))
        assert signal.getsignal(number) == signal.default_int_handler
    finally:
        signal.signal(number, usual)
    assert objects.read(name) == b"whole"


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/update_000003/manifest.json"])
def test_a_file_that_cannot_be_read_here_stays_as_it_was_in_an_object_store(objects: Storage, name: str) -> None:
    objects._store(name, io.BytesIO(b"older"))
    with pytest.raises(StorageError, match=r"cannot be written: .*Input/output error"):
        objects._store(name, Interrupted(b"newer", fail))
    assert objects.read(name) == b"older"


def test_places_that_would_vanish_or_show_a_password_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_place("runs/here")
    with pytest.raises(CommandError, match="holds a password") as raised:
        check_place("s3://me:hunter2@bucket/run")
    assert "hunter2" not in str(raised.value)
    for secret in ("client_secret", "sig", "sse_customer_key", "AWSAccessKeyId", "X-Goog-Signature", "session%5Ftoken"):
        named = secret.replace("%5F", "_")
        with pytest.raises(CommandError, match=f"^abfs://… holds {named}, which run folders, logs") as raised:
            check_place(f"abfs://box@account/run?tenant_id=a&{secret}=hunter2")
        assert "hunter2" not in str(raised.value)
    check_place("s3://bucket/run?endpoint_override=host:9000&scheme=http&region=here&sse=1")
    check_place("abfs://box@account/run?credential_kind=environment&client_id=a&tenant_id=b")
    with pytest.raises(CommandError, match="is no place for a run"):
        Storage("ftp://host/run")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    check_place("/shared/run")
    check_place("gs://bucket/run")
    with pytest.raises(CommandError, match="would vanish with the job's working directory"):
        check_place("runs/here")
