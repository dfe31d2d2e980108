"""Reading runs in storage by commands that do not train."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs
import pytest
from transformers import AutoModelForCausalLM

from launch.console.errors import CommandError
from launch.evaluation.target import find_run
from launch.main import main
from launch.models.trained import POLICIES, open_trained
from launch.run_folder.run import Run
from launch.run_folder.status import read_run
from launch.run_folder.storage import Storage
from policies.models.model_names import AVERAGE_POLICY


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
    with pytest.raises(CommandError, match=r"^Invalid run URI ftp://host/run"):
        read_run("ftp://host/run")
