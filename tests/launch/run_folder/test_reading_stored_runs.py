"""Reading runs in storage by commands that do not train."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs
import pytest
from transformers import AutoModelForCausalLM

from launch.commands import watch
from launch.console.errors import CommandError
from launch.evaluation.target import find_run
from launch.main import main
from launch.models.trained import POLICIES, open_trained
from launch.run_folder.records import Update
from launch.run_folder.run import Run
from launch.run_folder.status import read_run
from launch.run_folder.storage import Storage, StorageError
from policies.models.model_names import AVERAGE_POLICY
from tests.launch.conftest import record_test_run
from tests.launch.run_folder.conftest import SETTINGS


@pytest.fixture
def bucket(home: Path, tmp_path: Path, policies_run: Run) -> Path:
    """Folder of a stored run of 6 updates, accessed through a file system that `pyarrow` does not treat as local."""
    path = tmp_path / "bucket" / "run"
    Storage(uri_of(path)).upload(policies_run.path, keep=2, best=5)
    return path


def uri_of(path: Path) -> str:
    return f"fsspec+file://{path}"


def test_a_run_in_storage_reads_like_its_folder_and_is_downloaded_once(
    bucket: Path, policies_run: Run, home: Path
) -> None:
    stored, local = open_trained(uri_of(bucket)), open_trained(policies_run.path)
    assert (stored.update, stored.settings, stored.metrics) == (5, local.settings, local.metrics)
    for name, array in local.weights("llm_2").items():
        np.testing.assert_array_equal(stored.weights("llm_2")[name], array)
    assert stored.folder is not None and stored.run is not None
    assert home in stored.folder.parents and not list(stored.folder.glob("algorithm_state*"))
    assert not list(stored.run.checkpoints.path_of(6).iterdir())
    copies = {file: file.stat().st_ino for file in stored.folder.rglob("*.safetensors")}
    assert open_trained(uri_of(bucket)).weights("llm_1").keys() == local.weights("llm_1").keys()
    assert copies and {file: file.stat().st_ino for file in copies} == copies
    assert read_run(f"file://{bucket}").path == bucket  # read in place


def test_commands_accept_the_uri_of_a_run(
    bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    uri = uri_of(bucket)
    assert main(["plot", uri]) == 0
    assert capsys.readouterr().out == "run-curves.png\n" and (tmp_path / "run-curves.png").stat().st_size > 5_000
    assert main(["generate", uri, "This movie", "--roles", "llm_2", "--checkpoint", "6"]) == 0
    output, errors = capsys.readouterr()
    assert "pioneer (llm_2): " in output and f"llm_2, after update 6 of {uri}" in errors
    assert main(["export", uri, "--policy", "llm_1", "--out", "model"]) == 0
    assert "model: llm_1 after update 5, fp32" in capsys.readouterr().out
    assert main(["watch", uri, "--once"]) == 0
    assert "Update 6 of 6" in capsys.readouterr().out
    run_folder = find_run(uri)
    assert run_folder is not None and run_folder.checkpoints.choose("latest", POLICIES)[0] == 6


def test_a_storage_failure_leaves_no_partial_export_and_the_next_attempt_succeeds(
    bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [uri_of(bucket), "--policy", "mean", "--out", str(tmp_path / "out")]
    copy = pyarrow.fs.copy_files

    def failing_copy(source: str, target: str, *rest: Any, **options: Any) -> None:
        if "llm_2" in target:
            Path(target).write_bytes(b"half")
            raise OSError("connection reset by peer")
        copy(source, target, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(pyarrow.fs, "copy_files", failing_copy)
        assert main(["export", *words]) == 2
    message = capsys.readouterr().err
    assert "connection reset by peer" in message and uri_of(bucket) in message and len(message.splitlines()) == 1
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".unfinished*"))
    assert main(["export", *words]) == 0
    stored, local = open_trained(uri_of(bucket)), AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, array in stored.weights(AVERAGE_POLICY).items():
        np.testing.assert_array_equal(local.get_parameter(name).detach().numpy(), array)


def test_missing_items_in_storage_are_reported_with_their_uris(
    bucket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = uri_of(bucket)
    with pytest.raises(
        CommandError, match=rf"^{re.escape(uri)}/checkpoints has no checkpoint `1`\. It has: best \(5\), latest "
    ):
        open_trained(uri, "1")
    (weights,) = (bucket / "checkpoints" / "update_000006" / POLICIES / "llm_1").iterdir()
    weights.write_bytes(b"torn")
    with pytest.raises(
        CommandError, match=rf"^{re.escape(uri)}/checkpoints/update_000006 has a damaged file .*--checkpoint: best"
    ):
        open_trained(uri, "6")
    with pytest.raises(CommandError, match=rf"^Unknown policy `llm_3`\. {re.escape(uri)} has"):
        open_trained(uri, "5").resolve_names(["llm_3"])
    with pytest.raises(CommandError, match=rf"{re.escape(uri)}x is not a run's folder"):
        read_run(f"{uri}x")
    with pytest.raises(CommandError, match="contains a password"):
        read_run("s3://me:word@bucket/run")
    assert main(["watch", "ftp://host/run"]) == 2
    assert capsys.readouterr().err.startswith("Error: Invalid run URI ftp://host/run")


def partly_stored_run(folder: Path) -> tuple[Run, list[Update], Storage]:
    """Returns a run with 3 of 12 updates in storage, all of its metrics, and the storage."""
    run = record_test_run(folder / "run", SETTINGS, updates=range(4))
    storage = Storage(uri_of(folder / "bucket" / "run"))
    storage.upload(run.path, keep=2, best=None)
    return run, record_test_run(folder / "later", SETTINGS).updates(), storage


def test_watch_follows_a_run_in_storage_until_it_is_done(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, lines, storage = partly_stored_run(tmp_path)

    def train(seconds: float) -> None:
        """Trains four updates between two polls."""
        assert seconds == watch.STORAGE_POLL_SECONDS
        for line in lines[len(run.updates()) :][:4]:
            run.metrics.append(line)
        storage.upload(run.path, keep=2, best=None)

    monkeypatch.setattr("launch.commands.watch.time.sleep", train)
    assert main(["watch", storage.uri]) == 0
    output = capsys.readouterr().out
    assert [line.split("/")[0].strip() for line in output.splitlines() if "llm_" in line and "/12" in line] == [
        str(update) for update in range(1, 13)
    ]
    assert "process" not in output and output.endswith("done\n")


def test_watch_retries_if_storage_is_temporarily_unreadable(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, lines, storage = partly_stored_run(tmp_path)
    download = Storage.download
    downloads: list[Path] = []

    def shaky(self: Storage, folder: Path, *rest: Any) -> None:
        downloads.append(folder)
        if len(downloads) in (2, 3):
            raise StorageError("The bucket cannot be read: no network.")
        if len(downloads) == 4:
            for line in lines[4:]:
                run.metrics.append(line)
            storage.upload(run.path, keep=2, best=None)
        download(self, folder, *rest)

    monkeypatch.setattr(Storage, "download", shaky)
    monkeypatch.setattr(watch, "STORAGE_POLL_SECONDS", 0.0)
    monkeypatch.setattr("launch.console.retry.RETRY_INTERVAL", 0.05)
    monkeypatch.setattr("launch.console.retry.RETRY_SECONDS", 0.0)
    assert main(["watch", storage.uri]) == 2
    assert "Error: The bucket cannot be read: no network." in capsys.readouterr().err
    downloads.clear()
    monkeypatch.setattr("launch.console.retry.RETRY_SECONDS", 60.0)
    assert main(["watch", storage.uri]) == 0
    output = capsys.readouterr().out
    assert output.count("Warning: The bucket cannot be read: no network. Retrying for a minute.\n") == 1
    assert output.endswith("done\n")
