"""A run in an S3 bucket, with moto's server.

`pip install 'moto[server]>=5.2.5'`, or MOTO_SERVER=its path.
Older versions may not finish an upload (5.2.1 does not with pyarrow 26).
"""

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow.fs import FileSelector, S3FileSystem

from tests.launch.conftest import Cory
from tests.launch.training.test_training import BREVITY, SMALL

SERVER = os.environ.get("MOTO_SERVER") or shutil.which("moto_server")
STARTS = 60.0
"""Seconds for the server to start."""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(SERVER is None, reason="moto's server is not installed")]


@pytest.fixture
def bucket() -> Iterator[tuple[S3FileSystem, str]]:
    """An empty bucket, and the URI of a run in it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host, port = free.getsockname()
    address = f"{host}:{port}"
    process = subprocess.Popen([str(SERVER), "-H", host, "-p", str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + STARTS
        while True:
            try:
                socket.create_connection((host, port)).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, "moto's server did not start"
                time.sleep(0.2)
        filesystem = S3FileSystem(
            access_key="key", secret_key="word", endpoint_override=address, scheme="http", allow_bucket_creation=True
        )
        filesystem.create_dir("bucket")
        try:
            with filesystem.open_output_stream("bucket/trial") as trial:
                trial.write(b"x")
        except OSError as error:
            pytest.skip(f"this version of moto's server does not accept uploads: {error}")
        yield filesystem, f"s3://bucket/run?endpoint_override={address}&scheme=http"
    finally:
        process.kill()
        process.wait()


def test_a_run_in_a_bucket_is_trained_resumed_and_evaluated(
    bucket: tuple[S3FileSystem, str], cory: Cory, tmp_path: Path
) -> None:
    filesystem, uri = bucket
    (tmp_path / "my_rewards.py").write_text(BREVITY)
    environment = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "word",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    assert cory("train", *SMALL, "checkpoint_every=1", "--out", uri, **environment).returncode == 0
    shutil.rmtree(tmp_path / "cache")  # as on another machine
    resumed = cory("train", "--resume", uri, "num_updates=4", **environment)
    assert resumed.returncode == 0 and "(resuming after update 3)" in resumed.stdout, resumed.stderr
    with filesystem.open_input_stream("bucket/run/metrics.jsonl") as metrics:
        assert [json.loads(line)["update"] for line in metrics.read().splitlines()] == [0, 1, 2, 3, 4]
    paths = [file.path for file in filesystem.get_file_info(FileSelector("bucket/run/checkpoints", recursive=True))]
    assert "bucket/run/checkpoints/update_000004/manifest.json" in paths
    evaluated = cory("evaluate", uri, "--checkpoint", "latest", "--queries", "2", "--samples", "1", **environment)
    assert evaluated.returncode == 0 and "llm_1 after llm_2" in evaluated.stdout, evaluated.stderr
    missing = cory("plot", uri.replace("bucket/run", "nobody/run"), **environment)
    assert missing.returncode == 2 and missing.stderr.startswith("Error: s3://nobody/run")
