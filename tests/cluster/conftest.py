"""A real Ray head with its dashboard, which wants a token, and the `cory` command as its user runs it."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.request import Request, urlopen

import pytest

from tests.launch.conftest import CHECKOUT, ENVIRONMENT

SECRET = "hf_" + secrets.token_hex(16)
"""Must be nowhere but in the nodes' file."""


class Head(NamedTuple):
    """The head of a cluster."""

    address: str
    """Of the dashboard."""
    environment: dict[str, str]
    """Of those who know the token."""
    secrets: Path
    """A file with a secret, as nodes have it."""

    def cory(self, *words: str, cwd: Path, **environment: str) -> "subprocess.Popen[str]":
        """Starts `cory ...`."""
        return self.python("-m", "launch.main", *words, cwd=cwd, **environment)

    def python(self, *words: str, cwd: Path, **environment: str) -> "subprocess.Popen[str]":
        """Starts Python, as one who knows the token."""
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=cwd,
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for listening in sockets:
        listening.bind(("127.0.0.1", 0))
    ports = [listening.getsockname()[1] for listening in sockets]
    for listening in sockets:
        listening.close()
    return ports


@pytest.fixture(scope="session")
def head() -> Iterator[Head]:
    """A head with two CPUs."""
    folder = Path(tempfile.mkdtemp(prefix="head-", dir="/tmp"))  # short: paths of sockets may have 107 characters
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    (folder / "secrets.env").write_text(f"# for the nodes\nHF_TOKEN={SECRET}\n")
    port, dashboard, agent, client, metrics = free_ports(5)
    address = f"http://127.0.0.1:{dashboard}"
    environment = {
        **ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_API_SERVER_ADDRESS": address,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=2", "--num-gpus=0"),
        *(f"--port={port}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", f"--temp-dir={folder}"),
        *(f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}"),
        *(f"--metrics-export-port={metrics}", "--min-worker-port=0", "--max-worker-port=0"),
    ]
    log = folder / "head.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=output, stderr=output, start_new_session=True
        )
    try:
        _wait(Request(f"{address}/api/version", headers={"authorization": f"Bearer {token.read_text()}"}), process, log)
        yield Head(address, environment, folder / "secrets.env")
    finally:
        process.send_signal(signal.SIGTERM)  # ends what it started, too
        process.wait(timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


def _wait(question: Request, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            with urlopen(question, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"No head after 90 s: {log.read_text()}")
