"""Starting or joining Ray: slow starts, network access and tokens."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cory_env.home import IN_JOB
from launch.cluster import session
from launch.console.errors import CommandError
from policies.settings.processes import processes
from policies.settings.settings import make_settings
from tests.launch.conftest import ENVIRONMENT

LATE = """
import time
from ray._private import services

look, began = services.get_node, time.monotonic()

def late(*arguments):
    if time.monotonic() < began + 60:
        raise RuntimeError("not yet")
    return look(*arguments)

services.get_node = late
from launch.cluster.session import ray_session
from policies.settings.processes import processes
from policies.settings.settings import Settings

with ray_session(processes(Settings()), debug=False):
    import ray
    print(len(ray.nodes()), "node")
"""

LISTENING = """
import os
import psutil
from launch.cluster.session import quiet_libraries, ray_session

quiet_libraries(debug=False)
with ray_session([], debug=False):
    import ray

    class Worker:
        def here(self):
            return True

    worker = ray.remote(Worker).remote()
    assert ray.get(worker.here.remote())
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        assert not {"dashboard.py", "monitor.py"} & {word.rpartition("/")[2] for word in process.cmdline()}
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                print(connection.laddr.ip)
    assert os.listdir(os.environ["RAY_TMPDIR"])
assert not os.listdir(os.environ["RAY_TMPDIR"])
"""
JOINING = """
from launch.cluster.session import init_ray, quiet_libraries

quiet_libraries(debug=False)
init_ray()
"""

REQUEST = """
from launch.cluster.session import ray_session
from policies.settings.processes import processes
from policies.settings.settings import Settings

with ray_session(processes(Settings(num_runners=1, gpus_per_runner=1)), debug=False):
    print("begun")
"""


def test_a_start_timeout_of_ray_is_reported_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup. This could happen because")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", init)
    with pytest.raises(CommandError, match=r"Ray did not start within 120 s\. This machine is too busy"):
        session.init_ray(address="auto")


def test_joining_a_cluster_is_retried_only_within_the_given_time(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[object] = []

    def init(**options: object) -> None:
        attempts.append(options)
        if len(attempts) < 4:
            raise ConnectionError("no head yet")

    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr(session, "RETRY_INTERVAL", 0.01)
    monkeypatch.setenv(session.UNCHECKED, "1")
    with pytest.raises(CommandError, match="no head yet"), session.ray_session((), debug=False):
        pass
    assert len(attempts) == 1
    with session.ray_session((), debug=False, retry_seconds=60.0):
        assert len(attempts) == 4


def test_a_run_that_the_driver_does_alone_needs_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def ray_session(*_: object) -> contextlib.AbstractContextManager[None]:
        started.append("Ray")
        return contextlib.nullcontext()

    monkeypatch.setattr(session, "ray_session", ray_session)

    def starts(**settings: int) -> list[str]:
        started.clear()
        kinds = processes(make_settings(settings))
        with session.run_session(kinds, debug=False, on_start=lambda: started.append("told")):
            return [*started]

    assert starts(num_runners=0) == []
    assert starts(num_runners=1) == starts(num_runners=0, num_learners=1) == ["told", "Ray"]
    assert starts(num_runners=0, gpus_per_learner=1, gpus_per_runner=0) == ["told", "Ray"]
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert starts(num_runners=0) == ["told", "Ray"]


@pytest.mark.parametrize("parent", ["/tmp/" + "x" * 20, "/tmp/missing"])
def test_a_long_or_missing_folder_of_ray_is_replaced_and_its_logs_are_kept_after_a_bug(
    monkeypatch: pytest.MonkeyPatch, parent: str
) -> None:
    folders: list[Path] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", parent)
    monkeypatch.setenv(session.UNCHECKED, "1")
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr(session, "init_ray", lambda **options: folders.append(Path(options["_temp_dir"])))
    with session.ray_session((), debug=False):
        assert folders[0].parent == Path("/tmp") and folders[0].is_dir()
    assert not folders[0].exists()
    with pytest.raises(KeyError) as raised, session.ray_session((), debug=False):
        raise KeyError("a bug")
    assert raised.value.__notes__ == [f"Ray's logs are in {folders[1]}."] and folders[1].is_dir()
    shutil.rmtree(folders[1])


@pytest.mark.slow
def test_ray_may_take_longer_to_start_than_its_own_timeout() -> None:
    result = subprocess.run(
        [sys.executable, "-c", LATE], env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )
    assert (result.returncode, result.stdout) == (0, "1 node\n"), result.stderr


def test_a_local_ray_listens_on_loopback_only_without_dashboard_and_autoscaler_and_leaves_no_files() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a short path
        environment = {**ENVIRONMENT, "RAY_TMPDIR": folder}
        result = subprocess.run(
            [sys.executable, "-c", LISTENING], env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    assert result.returncode == 0, result.stderr
    addresses = [address.removeprefix("::ffff:") for address in result.stdout.split()]
    assert len(addresses) > 3 and set(addresses) <= {"127.0.0.1", "::1"}, addresses


@pytest.mark.parametrize(
    ("environment", "mode"),
    [
        ({}, "disabled"),
        ({"RAY_ADDRESS": "127.0.0.1:6379"}, "disabled"),
        ({"RAY_ADDRESS": "ray://localhost:10001"}, "disabled"),
        ({"RAY_ADDRESS": "10.0.0.1:6379"}, "token"),
        ({"RAY_ADDRESS": "10.0.0.1:6379", "RAY_AUTH_MODE": "disabled"}, "disabled"),
        ({"RAY_ADDRESS": "auto"}, None),  # Ray handles it
        ({"RAY_ADDRESS": "[::1:6379"}, None),  # an invalid address, which `init_ray` reports
        ({"RAY_ADDRESS": "10.0.0.1:6379", IN_JOB: "{}"}, None),  # the job's node handles it
    ],
)
def test_remote_clusters_require_a_token(
    environment: dict[str, str], mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", environment)
    session.quiet_libraries(debug=True)
    assert environment.get("RAY_AUTH_MODE") == mode


def test_a_missing_token_is_reported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as cluster:
        address = f"127.0.0.1:{cluster.getsockname()[1]}"
        environment = {**ENVIRONMENT, "HOME": str(tmp_path), "RAY_AUTH_MODE": "token", "RAY_ADDRESS": address}
        result = subprocess.run(
            [sys.executable, "-c", JOINING], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
    assert f"CommandError: Missing or invalid token for the cluster at RAY_ADDRESS={address}. Set" in result.stderr


@pytest.mark.slow
def test_unchecked_sessions_wait_for_an_autoscaling_cluster() -> None:
    def run_request(
        **environment: str,
    ) -> "subprocess.CompletedProcess[str]":  # in a new process, because this one may have joined Ray
        return subprocess.run(
            [sys.executable, "-c", REQUEST], env={**ENVIRONMENT, **environment}, capture_output=True, text=True
        )

    waiting = run_request(CORY_UNCHECKED="1")
    assert (waiting.returncode, waiting.stdout) == (0, "begun\n"), waiting.stderr
    failing = run_request()
    assert failing.returncode == 1 and "has 0 sampling left" in failing.stderr


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("nowhere", "Invalid"),
        ("127.0.0.1:1", "Connection refused"),  # an unused port, as of a cluster that is gone
        ("ray://localhost:1", "Connection refused"),
        ("head:x", "Port could not be cast"),
    ],
)
def test_an_unreachable_cluster_is_reported_in_one_sentence(
    address: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    message = rf"^No Ray cluster answers at RAY_ADDRESS={address}: {reason}.*\. Correct it, or"
    with pytest.raises(CommandError, match=message):
        session.init_ray(log_to_driver=False)
