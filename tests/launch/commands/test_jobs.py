"""`cory jobs`, including error responses of the cluster."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import cast

import pytest
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient, JobType

from launch.cluster.client import STOP_WAIT, connect
from launch.cluster.jobs import check_no_active_job, follow_job
from launch.cluster.session import init_ray
from launch.console.errors import CommandError
from launch.main import main
from tests.launch.conftest import ENVIRONMENT

REQUEST = """
from launch.cluster.session import ray_session
from policies.settings.processes import processes
from policies.settings.settings import Settings

with ray_session(processes(Settings(num_runners=1, runner_resources="sampling=1")), debug=False):
    print("begun")
"""
VERSION = json.dumps({"version": "4", "ray_version": "2.60.0", "ray_commit": "", "session_name": ""})
TRACE = "Traceback (most recent call last):\n  File x\nOSError: no GCS\n"


def job_response(status: str, **more: object) -> tuple[int, str]:
    """Returns a dashboard's response for a job."""
    details = {
        "type": "SUBMISSION",
        "submission_id": "one",
        "status": status,
        "entrypoint": "python -m launch.main train",
    }
    return 200, json.dumps({**details, **more})


class Dashboard(HTTPServer):
    """A dashboard with a list of responses for each path; the last one is repeated."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.answers = {"/api/version": [(200, VERSION)]}


class Handler(BaseHTTPRequestHandler):
    """Sends the responses of a `Dashboard`."""

    server: Dashboard

    def do_GET(self) -> None:
        answers = self.server.answers.get(self.path, [(404, TRACE)])
        status, body = answers.pop(0) if len(answers) > 1 else answers[0]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dashboard]:
    server = Dashboard()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", server.address)
    yield server
    server.shutdown()
    server.server_close()


def test_errors_of_a_cluster_are_one_sentence_and_distinct_from_missing_jobs(
    dashboard: Dashboard, capsys: pytest.CaptureFixture[str]
) -> None:
    dashboard.answers |= {"/api/jobs/": [(500, TRACE)], "/api/jobs/ill": [(500, TRACE)]}
    assert main(["jobs", "logs", "gone"]) == 2
    assert capsys.readouterr().err == "Error: Job gone not found. `cory jobs list` shows all jobs.\n"
    for words in (["logs", "ill"], ["stop", "ill"], ["list"]):
        assert main(["jobs", *words]) == 2
        assert capsys.readouterr().err == (
            f"Error: The cluster at {dashboard.address} rejected the request: Request failed with status code 500: "
            "Traceback (most recent call last): OSError: no GCS. See the dashboard's logs on the head node.\n"
        )
    dashboard.answers["/api/jobs/ill"] = [(500, "")]
    assert main(["jobs", "logs", "ill"]) == 2
    assert "rejected the request: Request failed with status code 500:. See the" in capsys.readouterr().err  # only once
    with pytest.raises(CommandError, match="rejected the request: Request failed"):
        check_no_active_job(connect(dashboard.address), "/shared/one")


def test_following_a_job_ended_by_a_signal_returns_the_shell_s_exit_code(dashboard: Dashboard) -> None:
    for code, exit_code in ((-9, 137), (3, 3)):
        dashboard.answers["/api/jobs/one"] = [job_response("FAILED", driver_exit_code=code)]
        assert main(["jobs", "logs", "one"]) == exit_code


def test_following_a_job_retries_if_the_cluster_is_temporarily_unavailable(
    dashboard: Dashboard, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.console.retry.RETRY_INTERVAL", 0.05)
    for action in ("logs", "stop"):
        dashboard.answers["/api/jobs/one/stop"] = [(200, '{"stopped": true}')]
        dashboard.answers["/api/jobs/one"] = [
            job_response("RUNNING"),
            (502, "bad"),
            (502, "bad"),
            job_response("SUCCEEDED"),
        ]
        assert main(["jobs", action, "one"]) == 0
        errors = capsys.readouterr().err
        assert errors.startswith("Warning: The cluster at") and errors.endswith(" Retrying for a minute.\n")
        assert errors.count("\n") == 1
    monkeypatch.setattr("launch.cluster.jobs.RETRY_SECONDS", 0.0)
    dashboard.answers["/api/jobs/one"] = [job_response("RUNNING"), (502, "bad")]
    assert main(["jobs", "logs", "one"]) == 2
    assert capsys.readouterr().err.startswith("Error: The cluster at")


class EndlessClient:
    """A client whose job prints forever."""

    def __init__(self) -> None:
        self.num_requests = 0

    def get_job_info(self, job_response: str) -> JobDetails:
        """Returns a running job, up to four times."""
        self.num_requests += 1
        assert self.num_requests < 5, "the pipe is closed, but the job is still followed"
        return JobDetails(
            type=JobType.SUBMISSION, submission_id=job_response, status=JobStatus.RUNNING, entrypoint="cory train"
        )

    async def tail_job_logs(self, job_response: str) -> AsyncIterator[str]:
        """Yields the same line forever."""
        while True:
            yield "  1/40  llm_1→llm_2\n"


def test_following_a_job_stops_if_the_output_pipe_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(BrokenPipeError):
            follow_job(cast(JobSubmissionClient, EndlessClient()), "one")
        with contextlib.suppress(BrokenPipeError):
            output.close()


def test_commands_are_listed_verbatim(dashboard: Dashboard, capsys: pytest.CaptureFixture[str]) -> None:
    details = json.loads(job_response("RUNNING", entrypoint="cory train model=[a,b] system_prompt=[/x] :fire:")[1])
    dashboard.answers["/api/jobs/"] = [(200, json.dumps([details]))]
    assert main(["jobs"]) == 0
    assert "cory train model=[a,b] system_prompt=[/x] :fire:" in capsys.readouterr().out


@pytest.mark.parametrize(("after", "code"), [("STOPPED", 0), ("FAILED", 1)])
def test_stopping_a_job_reports_its_final_status(
    after: str, code: int, dashboard: Dashboard, capsys: pytest.CaptureFixture[str]
) -> None:
    dashboard.answers["/api/jobs/one/stop"] = [(200, '{"stopped": true}')]
    for variables, saves in (
        ({STOP_WAIT: "3600"}, " The training run finishes and saves its update first."),
        ({}, ""),
    ):
        dashboard.answers["/api/jobs/one"] = [
            job_response("RUNNING", runtime_env={"env_vars": variables}),
            job_response(after),
        ]
        assert main(["jobs", "stop", "one"]) == code
        assert capsys.readouterr().out.startswith(f"Stopping one.{saves}\none: {after}.")


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
        init_ray(log_to_driver=False)
