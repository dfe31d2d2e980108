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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


class Engine:
    """Docker or Podman."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs a command of the engine."""
        return subprocess.run([self.name, *words], capture_output=True, text=True)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """The first engine that is installed and works."""
    for name in ("docker", "podman"):
        if shutil.which(name) and Engine(name).run("info").returncode == 0:
            return Engine(name)
    pytest.skip("no container engine works here")


@pytest.fixture(scope="module")
def image(engine: Engine) -> str:
    """The image's name."""
    if name := os.environ.get("CORY_IMAGE"):
        return name
    words = ["build", "--file", "docker/Dockerfile", "--target", "cpu", "--tag", "cory-rllib:test"]
    if engine.name == "podman":
        words += ["--format", "docker"]  # otherwise it drops the health check
    built = engine.run(*words, str(CHECKOUT))
    assert built.returncode == 0, built.stderr[-3000:]
    return "cory-rllib:test"


def test_the_image_trains_as_an_ordinary_user_without_a_network(engine: Engine, image: str) -> None:
    train = "cory train imdb-tiny num_updates=1 queries_per_update=8 minibatch_size=8 eval_queries=8 --out /runs/first"
    command = (
        f"test $(id -u) = 1000 && cory --version | grep -F {version('cory-rllib')} && "
        f"RAY_AUTH_MODE=disabled {train} && cat /runs/first/metrics.jsonl"
    )
    trained = engine.run("run", "--rm", "--network", "none", "--shm-size", "2g", image, "sh", "-c", command)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert trained.stdout.rstrip().splitlines()[-1].startswith('{"update": 1, ')


@pytest.fixture
def head(engine: Engine, image: str) -> Iterator[str]:
    """A running head node of a cluster."""
    ray = "printf %s 0123456789abcdef0123456789abcdef > ~/token && exec ray start --head --num-cpus=1 --block"
    options = ("--detach", "--shm-size", "2g", "--env", "RAY_AUTH_TOKEN_PATH=/home/cory/token")
    started = engine.run("run", *options, image, "sh", "-c", ray)
    assert started.returncode == 0, started.stderr
    container = started.stdout.strip()
    yield container
    engine.run("rm", "--force", container)


def test_a_head_becomes_healthy(engine: Engine, head: str) -> None:
    deadline, state = time.monotonic() + 120, ""
    while state != "healthy" and time.monotonic() < deadline:
        time.sleep(2)
        if engine.name == "podman":  # it needs systemd to check by itself
            engine.run("healthcheck", "run", head)
        state = engine.run("inspect", "--format", "{{.State.Health.Status}}", head).stdout.strip()
    assert state == "healthy", engine.run("logs", head).stderr


def test_without_a_token_no_node_starts(engine: Engine, image: str) -> None:
    refused = engine.run("run", "--rm", image, "ray", "start", "--head", "--block")
    assert refused.returncode != 0
    assert "token" in (refused.stdout + refused.stderr).lower()
