"""Uploading a run's folder to storage atomically, and downloading it."""

import contextlib
import platform
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec.implementations.local  # type: ignore[import-untyped]
import pytest
from pyarrow.fs import FileSystem, FSSpecHandler, LocalFileSystem, PyFileSystem, _MockFileSystem

from launch.console.errors import CommandError
from launch.run_folder import manifest
from launch.run_folder.run import Run
from launch.run_folder.storage import Storage, StorageError, WriterChangedError, check_location
from tests.launch.conftest import record_test_run
from tests.launch.run_folder.test_checkpoints import write_checkpoint
from tests.paper import paper_settings

SETTINGS = paper_settings(num_updates=12, keep_checkpoints=2)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with checkpoints of updates 3, 6, 9 and 12. Updates 6 and 12 were evaluated; 12 is better."""
    run = record_test_run(tmp_path / "run", SETTINGS)
    for update in (3, 6, 9, 12):
        run.checkpoints.save(update, write_checkpoint)
    run.unlock()
    return run


@pytest.fixture(params=["mock", "local"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    files: FileSystem = _MockFileSystem() if request.param == "mock" else LocalFileSystem()
    base = "bucket/run" if request.param == "mock" else str(tmp_path / "storage" / "run")
    return Storage("test://bucket/run", (files, base))


def test_an_uploaded_run_is_downloaded_with_only_its_latest_checkpoint(
    run: Run, storage: Storage, tmp_path: Path
) -> None:
    storage.upload(run.path, keep=2, best=3)
    assert storage.updates() == [3, 9, 12]
    downloaded = Run(tmp_path / "elsewhere")
    storage.download(downloaded.path)
    assert downloaded.settings == SETTINGS and downloaded.metrics == run.metrics
    assert not downloaded.checkpoints.updates()
    storage.download_checkpoint(downloaded.path)
    assert downloaded.checkpoints.updates() == [12] and downloaded.checkpoints.choose(None)[0] == 12

    # The other machine resumes: the best checkpoint is kept although it was never downloaded; old ones are removed.
    downloaded.checkpoints.save(15, write_checkpoint)
    downloaded.metrics_file.append({"update": 15})
    storage.upload(downloaded.path, keep=2, best=3)
    assert storage.updates() == [3, 12, 15]
    assert not [name for name in storage.files() if "update_000009" in name or name.endswith(".part")]


def test_keys_that_would_escape_the_folder_are_ignored(run: Run, tmp_path: Path) -> None:
    files = _MockFileSystem()
    storage = Storage("test://bucket/run", (files, "bucket/run"))
    storage.upload(run.path, keep=2, best=None)
    for key in (
        "evaluation/../../out/evaluation.json",
        "checkpoints/update_000012/../../../out/weights",
        "checkpoints/../out/log.txt",
        "../out/log.txt",
    ):
        files.create_dir(f"bucket/run/{key.rpartition('/')[0]}", recursive=True)
        with files.open_output_stream(f"bucket/run/{key}") as stream:
            stream.write(b"evil")
    copy = tmp_path / "deep" / "copy"
    storage.download(copy)
    storage.download_checkpoint(copy)
    storage.upload(run.path, keep=2, best=None)
    assert files.get_file_info(
        "bucket/run/checkpoints/../out/log.txt"
    ).is_file  # not a checkpoint's folder, so not removed
    assert [entry.name for entry in (tmp_path / "deep").iterdir()] == ["copy"]
    assert not [file for file in copy.rglob("*") if file.is_file() and file.read_bytes() == b"evil"]


def test_a_cancelled_upload_leaves_the_previous_state_and_the_next_one_completes_it(run: Run, storage: Storage) -> None:
    storage.upload(run.path, keep=2, best=3)
    run.checkpoints.save(15, write_checkpoint)
    for limit in range(100):
        answers = iter([False] * limit)
        storage.upload(run.path, keep=1, best=3, cancelled=lambda answers=answers: next(answers, True))  # type: ignore[misc]
        if 15 in storage.updates():
            break
        assert storage.updates() == [3, 9, 12]
    assert 2 < limit < 99 and storage.updates() in ([3, 15], [3, 9, 12, 15])
    storage.upload(run.path, keep=1, best=3)
    assert storage.updates() == [3, 15]


class FailingFileSystem(fsspec.implementations.local.LocalFileSystem):
    """A file system that fails at the nth write, like a kill; with `torn`, in the middle of a file."""

    cachable, protocol = False, "broken"

    def __init__(self, leftover: int, torn: bool) -> None:
        super().__init__()
        self.left, self.torn = leftover, torn

    def count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError("killed")

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode and self.torn and self.left == 0:
            Path(path).write_text("torn")
        if "w" in mode:
            self.count()
        return super().open(path, mode, **options)

    def mv(self, *paths: str, **options: Any) -> None:
        self.count()
        super().mv(*paths, **options)

    def rm(self, *paths: str, **options: Any) -> None:
        self.count()
        super().rm(*paths, **options)


@pytest.mark.parametrize("is_object_store", [False, True])
@pytest.mark.parametrize("is_first", [True, False])
def test_an_upload_killed_at_any_object_leaves_a_state_to_resume_from(
    run: Run, is_first: bool, is_object_store: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = 4 if is_first else 1
    updates = (3, 6, 9, 12) if is_first else (3, 6, 9, 12, 15)
    if is_object_store:
        monkeypatch.setattr("launch.run_folder.storage.OBJECT_STORES", ("py::fsspec+broken",))
    observed = set()
    for limit in range(200):
        path = tmp_path / f"storage{limit}"
        storage = Storage("test://run", (LocalFileSystem(), str(path)))
        if not is_first:
            shutil.rmtree(run.checkpoints.path_of(15), ignore_errors=True)
            storage.upload(run.path, keep=4, best=3)
            run.checkpoints.save(15, write_checkpoint)
        if is_object_store:  # object stores have no folders
            for update in updates:
                (path / "checkpoints" / f"update_{update:06d}" / "deep").mkdir(parents=True, exist_ok=True)
        files = FailingFileSystem(limit, torn=not is_object_store)
        with contextlib.suppress(StorageError):
            Storage("test://run", (PyFileSystem(FSSpecHandler(files)), str(path))).upload(run.path, keep=keep, best=3)
        copy = Run(tmp_path / f"copy{limit}")
        storage = Storage("test://run", (LocalFileSystem(), str(path)))
        storage.download(copy.path)
        storage.download_checkpoint(copy.path)
        saved = storage.updates()
        assert not list(copy.path.rglob("*.part"))
        assert copy.checkpoints.updates() == saved[-1:] and copy.checkpoints.latest_valid() == max(saved, default=-1)
        for update in saved:
            assert manifest.verify(path / "checkpoints" / f"update_{update:06d}") is None
            assert copy.metrics == run.metrics and copy.settings == SETTINGS
        observed.add(tuple(saved))
        if files.left >= 0:
            break
        storage.upload(run.path, keep=keep, best=3)  # the next process
        assert storage.updates() == (list(updates) if is_first else [3, 15]) and not list(path.rglob("[!.]*.part"))
    assert limit > 10
    if is_first:
        assert observed == {(), (3,), (3, 6), (3, 6, 9), (3, 6, 9, 12)}
    else:
        assert (3, 6, 9, 12) in observed and (3, 15) in observed and all(3 in saved for saved in observed)


def test_a_file_that_its_library_removes_during_an_upload_is_skipped(run: Run, storage: Storage) -> None:
    removed = run.path / "zip"
    removed.write_text("another library's")

    def remove() -> bool:  # called before each file
        removed.unlink(missing_ok=True)
        return False

    storage.upload(run.path, keep=2, best=None, cancelled=remove)
    assert not removed.exists() and storage.read("zip") is None and storage.updates() == [9, 12]


class CleanedFileSystem(fsspec.implementations.local.LocalFileSystem):
    """A file system during whose uploads another program removes a local file."""

    cachable, protocol = False, "cleaned"

    def __init__(self, removed: Path) -> None:
        super().__init__()
        self.victim = removed

    def mkdir(self, *paths: str, **options: Any) -> None:
        self.victim.unlink(missing_ok=True)
        super().mkdir(*paths, **options)


def test_a_file_removed_during_its_upload_is_skipped(run: Run, tmp_path: Path) -> None:
    removed = run.path / "a"  # the first file to be uploaded
    removed.write_text("another library's")
    files = PyFileSystem(FSSpecHandler(CleanedFileSystem(removed)))
    storage = Storage("test://run", (files, str(tmp_path / "storage")))
    storage.upload(run.path, keep=2, best=None)
    assert not removed.exists() and storage.read("a") is None and storage.updates() == [9, 12]


def test_several_processes_may_take_a_run_over_at_once(tmp_path: Path) -> None:
    storages = [Storage(f"file://{tmp_path}/run") for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: storages[number % 4].take_over(), range(200)))
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".writer"]
    (tmp_path / "new").touch()
    owners = []
    for storage in storages:
        with contextlib.suppress(WriterChangedError):
            storage.upload(tmp_path, keep=1, best=None)
            owners.append(storage)
    assert len(owners) == 1


def test_an_incomplete_upload_of_an_old_checkpoint_is_removed(run: Run, tmp_path: Path) -> None:
    leftover = tmp_path / "storage" / "checkpoints" / "update_000010" / "weights.part"
    leftover.parent.mkdir(parents=True)
    leftover.touch()
    storage = Storage(f"file://{tmp_path}/storage")
    assert not storage.files()
    storage.upload(run.path, keep=2, best=None)
    assert storage.updates() == [9, 12] and not leftover.parent.exists()


def test_storage_is_written_without_a_temporary_folder(
    run: Run, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    storage.upload(run.path, keep=2, best=9)
    assert storage.read("checkpoints/best") == b"update_000009\n"


def test_a_process_that_was_taken_over_writes_and_removes_nothing(run: Run, storage: Storage) -> None:
    storage.upload(run.path, keep=2, best=3)
    before = {name: storage.read(name) for name in storage._all_files()}
    Storage(storage.uri, (storage._filesystem, storage._base)).take_over()
    run.metrics_file.append({"update": 13})
    run.checkpoints.save(15, write_checkpoint)
    message = rf"^test://bucket/run was taken over by process \d+ on {platform.node()}, so .* in {storage.cache()} on "
    for action in (lambda: storage.upload(run.path, keep=1, best=3), storage.clear, lambda: storage.remove(".writer")):
        with pytest.raises(WriterChangedError, match=message):
            action()
    after = {name: storage.read(name) for name in storage._all_files()}
    assert after.pop(".writer") != before.pop(".writer") and after == before


def test_an_upload_ends_at_the_file_during_which_another_process_takes_the_run_over(
    run: Run, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in range(100):
        storage = Storage(storage.uri, (storage._filesystem, storage._base))
        storage.take_over()
        storage.clear()
        answers = iter([False] * limit + [True])

        def take_over(answers: Iterator[bool] = answers, storage: Storage = storage) -> bool:
            if next(answers, False):  # before the next file
                Storage(storage.uri, (storage._filesystem, storage._base)).take_over()
            return False

        try:
            storage.upload(run.path, keep=1, best=None, cancelled=take_over)
            break
        except WriterChangedError:
            assert len(storage.files()) == limit or storage.updates() == []
    assert 2 < limit < 99


def test_locations_that_are_temporary_or_contain_a_secret_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    check_location("runs/here")
    with pytest.raises(CommandError, match="contains a password") as raised:
        check_location("s3://me:hunter2@bucket/run")
    assert "hunter2" not in str(raised.value)
    for secret in ("client_secret", "sig", "sse_customer_key", "AWSAccessKeyId", "X-Goog-Signature", "session%5Ftoken"):
        named = secret.replace("%5F", "_")
        with pytest.raises(CommandError, match=f"^abfs://… contains {named}, which run folders, logs") as raised:
            check_location(f"abfs://box@account/run?tenant_id=a&{secret}=hunter2")
        assert "hunter2" not in str(raised.value)
    check_location("s3://bucket/run?endpoint_override=host:9000&scheme=http&region=here&sse=1")
    check_location("abfs://box@account/run?credential_kind=environment&client_id=a&tenant_id=b")
    with pytest.raises(CommandError, match="Invalid run URI"):
        Storage("ftp://host/run")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    check_location("/shared/run")
    check_location("gs://bucket/run")
    with pytest.raises(CommandError, match="a Ray job's working directory is removed"):
        check_location("runs/here")
