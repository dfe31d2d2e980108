"""The CPU image, built and run by Docker or Podman. `CORY_IMAGE` names an image that is built already."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from importlib.metadata import version

import pytest

from tests.docker.conftest import CHECKOUT

ENGINE = shutil.which("docker") or shutil.which("podman")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(ENGINE is None, reason="no container engine"),
]


def engine(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([ENGINE or "", *words], capture_output=True, text=True)


@pytest.fixture(scope="module")
def image() -> str:
    if name := os.environ.get("CORY_IMAGE"):
        return name
    words = ["build", "--file", "docker/Dockerfile", "--target", "cpu", "--tag", "cory-rllib:test"]
    if "podman" in (ENGINE or ""):
        words += ["--format", "docker"]  # otherwise Podman drops the health check
    built = engine(*words, str(CHECKOUT))
    assert built.returncode == 0, built.stderr[-3000:]
    return "cory-rllib:test"


def test_the_image_trains_as_an_ordinary_user_without_a_network(image: str) -> None:
    train = "cory train imdb-tiny num_updates=1 queries_per_update=8 minibatch_size=8 eval_queries=8 --out /runs/first"
    command = (
        f"test $(id -u) = 1000 && cory --version | grep -F {version('cory-rllib')} && "
        f"RAY_AUTH_MODE=disabled {train} && cat /runs/first/metrics.jsonl"
    )
    trained = engine("run", "--rm", "--network", "none", "--shm-size", "2g", image, "sh", "-c", command)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert trained.stdout.rstrip().splitlines()[-1].startswith('{"update": 1, ')


@pytest.fixture
def head(image: str) -> Iterator[str]:
    """A running head node of a cluster."""
    ray = "printf %s 0123456789abcdef0123456789abcdef > ~/token && exec ray start --head --num-cpus=1 --block"
    token = ("--env", "RAY_AUTH_TOKEN_PATH=/home/cory/token")
    container = engine("run", "--detach", "--shm-size", "2g", *token, image, "sh", "-c", ray).stdout.strip()
    yield container
    engine("rm", "--force", container)


def test_a_head_becomes_healthy(head: str) -> None:
    deadline = time.monotonic() + 120
    state = ""
    while state != "healthy" and time.monotonic() < deadline:
        time.sleep(2)
        if "podman" in (ENGINE or ""):  # which needs systemd to check by itself
            engine("healthcheck", "run", head)
        state = engine("inspect", "--format", "{{.State.Health.Status}}", head).stdout.strip()
    assert state == "healthy", engine("logs", head).stderr


def test_without_a_token_no_node_starts(image: str) -> None:
    refused = engine("run", "--rm", image, "ray", "start", "--head", "--block")
    assert refused.returncode != 0
    assert "token" in (refused.stdout + refused.stderr).lower()
