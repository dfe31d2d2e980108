"""Jobs on a Ray cluster: detecting one that trains a run, polling its status, following its output."""

import asyncio
import sys
import time
from typing import TYPE_CHECKING

from launch.cluster.client import ClusterUnavailableError, cluster_errors
from launch.console.errors import CommandError
from launch.console.retry import RETRY_SECONDS, retry

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

STOPPED_EXIT_CODE = 143
"""Exit code of a stopped job: that of a driver that SIGTERM ended."""


def check_no_active_job(client: "JobSubmissionClient", location: str) -> None:
    """Checks that no job of the cluster writes to a run or search.

    Args:
        client: of the cluster.
        location: folder or URI of the run or search.

    Raises:
        CommandError: such a job is active; the message has its id.
        ClusterUnavailableError: the cluster rejects the request, or is unreachable.
    """
    with cluster_errors(client):
        jobs = client.list_jobs()
    for job in jobs:
        other = (job.metadata or {}).get("run")
        if other and _normalize_location(other) == _normalize_location(location) and not job.status.is_terminal():
            raise CommandError(
                f"Job {job.submission_id} is already working on {location}. Follow it with `cory jobs logs "
                f"{job.submission_id}`, or stop it first with `cory jobs stop {job.submission_id}`."
            )


def _normalize_location(location: str) -> str:
    """Makes a folder and its file:// URI equal."""
    return location.removeprefix("file://").rstrip("/")


def job_details(client: "JobSubmissionClient", job: str) -> "JobDetails":
    """Returns the details of a job.

    Raises:
        CommandError: the job does not exist.
        ClusterUnavailableError: the cluster rejects the request, or is unreachable.
    """
    with cluster_errors(client, job):
        return client.get_job_info(job)


def poll_job_details(client: "JobSubmissionClient", job: str) -> "JobDetails":
    """Returns the details of a job after half a second, with retries.

    Raises:
        CommandError: the job no longer exists.
        ClusterUnavailableError: the cluster has not responded for `RETRY_SECONDS`.
    """

    def warn(error: Exception) -> None:
        print(f"Warning: {error} Retrying for a minute.", file=sys.stderr, flush=True)

    time.sleep(0.5)
    return retry(lambda: job_details(client, job), RETRY_SECONDS, ClusterUnavailableError, warn)


def follow_job(client: "JobSubmissionClient", job: str) -> int:
    """Prints a job's output until it ends.

    Returns:
        The exit code of the job's driver; 128 + N if signal N ended it.
    """
    info = job_details(client, job)
    position = asyncio.run(_print_logs_from(client, job, 0))
    while not info.status.is_terminal():
        info = poll_job_details(client, job)
        position = asyncio.run(_print_logs_from(client, job, position))
    if (code := info.driver_exit_code) is not None:
        return 128 - code if code < 0 else code
    if info.status.value == "STOPPED":
        return STOPPED_EXIT_CODE
    if info.status.value != "SUCCEEDED":
        print(f"Error: job {job} failed: {info.message}", file=sys.stderr)
        return 1
    return 0


async def _print_logs_from(client: "JobSubmissionClient", job: str, start: int) -> int:
    """Prints a job's output from character `start` on while the job runs; returns the position of the end."""
    import aiohttp

    position = 0
    texts = aiter(client.tail_job_logs(job))
    while True:
        try:
            text = await anext(texts)
        except (aiohttp.ClientError, RuntimeError, OSError, StopAsyncIteration):
            return max(start, position)  # the connection may be broken: the caller checks the job's status
        new_text = text[max(start - position, 0) :]
        position += len(text)
        print(new_text, end="", flush=True)
