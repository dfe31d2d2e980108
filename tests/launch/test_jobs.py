"""What a cluster answers where it does not do as it is asked, and what the user is told of it."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from launch import jobs
from launch.cluster import connect
from launch.command import CommandError
from launch.session import ray_session
from launch.submit import _check_free
from tests.launch.conftest import ENVIRONMENT

ASKING = """
from launch.session import ray_session
from policies.placement import processes
from policies.settings import Settings

with ray_session(processes(Settings(num_runners=1, runner_resources="sampling=1")), debug=False):
    print("begun")
"""
ANSWERS = {"/api/version": 200, "/api/jobs/gone": 404, "/api/jobs/": 500, "/api/jobs/ill": 500}


class Refusing(BaseHTTPRequestHandler):
    """A dashboard whose jobs cannot be read."""

    def do_GET(self) -> None:
        """Answers."""
        self.send_response(ANSWERS[self.path])
        self.end_headers()
        body = json.dumps({"version": "4", "ray_version": "2.60.0", "ray_commit": "", "session_name": ""})
        trace = "Traceback (most recent call last):\n  File x\nOSError: no GCS\n"
        self.wfile.write((body if self.path == "/api/version" else trace).encode())

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", address)
    yield address
    server.shutdown()
    server.server_close()


def test_what_a_cluster_refuses_is_one_sentence_and_only_a_job_that_is_not_there_is_none(
    dashboard: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert jobs.main(["logs", "gone"]) == 2
    assert capsys.readouterr().err == "Error: There is no job gone; `cory jobs list` shows all.\n"
    for words in (["logs", "ill"], ["stop", "ill"], ["list"]):
        assert jobs.main(words) == 2
        assert capsys.readouterr().err == (
            f"Error: The cluster at {dashboard} does not do what it is asked: Request failed with status code 500: "
            "OSError: no GCS. The logs of its dashboard, on the head, say more.\n"
        )
    with pytest.raises(CommandError, match="does not do what it is asked"):
        _check_free(connect(dashboard), "/shared/one")


@pytest.mark.slow
def test_more_than_a_cluster_has_is_waited_for_where_it_grows() -> None:
    def begin(**environment: str) -> "subprocess.CompletedProcess[str]":  # this process may have a Ray already
        return subprocess.run(
            [sys.executable, "-c", ASKING], env={**ENVIRONMENT, **environment}, capture_output=True, text=True
        )

    grows = begin(CORY_UNCHECKED="1")
    assert (grows.returncode, grows.stdout) == (0, "begun\n"), grows.stderr
    stays = begin()
    assert stays.returncode == 1 and "has 0 sampling left" in stays.stderr


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("nowhere", "Invalid"),
        ("127.0.0.1:1", "Connection refused"),  # the port of a service that nobody runs: a cluster that is gone
        ("ray://localhost:1", "Connection refused"),
        ("head:x", "Port could not be cast"),
    ],
)
def test_a_cluster_that_does_not_answer_is_one_sentence(
    address: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    said = rf"^No Ray cluster answers at RAY_ADDRESS={address}: {reason}.*\. Correct it, or"
    with pytest.raises(CommandError, match=said), ray_session([], debug=False):
        pass
