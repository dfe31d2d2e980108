"""A real Ray head with a dashboard and token authentication, and the `ray` command as its client."""

import contextlib
import json
import os
import secrets
import shutil
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
"""Is only in the nodes' environment."""


class Head(NamedTuple):
    """The head of a cluster."""

    address: str
    """URL of the dashboard."""
    environment: dict[str, str]
    """Environment of clients, with the token."""

    def ray(self, *words: str, cwd: Path) -> "subprocess.Popen[str]":
        """Starts `ray ...` with the token."""
        return subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", *words],
            cwd=cwd,
            env=self.environment,
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
    folder = Path(
        tempfile.mkdtemp(prefix="head-", dir="/tmp")
    )  # short, because socket paths are limited to 107 characters
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
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
    question = Request(f"{address}/nodes?view=summary", headers={"authorization": f"Bearer {token.read_text()}"})
    for _ in range(3):  # on a busy machine, parts of Ray may time out, which ends the head
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                env={**environment, "HF_TOKEN": SECRET},
                cwd=folder,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        if _is_up(question, process):
            break
    else:
        raise AssertionError(f"No head: {log.read_text()}")
    try:
        yield Head(address, environment)
    finally:
        process.terminate()  # also ends its child processes
        process.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def _is_up(question: Request, process: "subprocess.Popen[bytes]") -> bool:
    """Waits until the head lists itself as a node; returns False if it ended."""
    while process.poll() is None:
        with contextlib.suppress(OSError), urlopen(question, timeout=5) as answer:
            if json.load(answer)["data"]["summary"]:
                return True
        time.sleep(0.5)
    return False
