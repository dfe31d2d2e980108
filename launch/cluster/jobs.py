"""Jobs on a Ray cluster: whether one is at work on a run, how it stands, and its output until it ends."""

import asyncio
import sys
import time
from typing import TYPE_CHECKING

from launch.cluster.client import ClusterUnavailableError, cluster_errors
from launch.console.errors import CommandError
from launch.console.retry import RETRY_SECONDS, retry

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

STOPPED = 143
"""Exit code of a job that was stopped: what SIGTERM gives its driver."""


def check_free(client: "JobSubmissionClient", place: str) -> None:
    """Refuses a run or search that a job of this cluster is at work on.

    Raises:
        CommandError: such a job, which is named.
        ClusterUnavailableError: the cluster refuses to say, or is gone.
    """
    with cluster_errors(client):
        jobs = client.list_jobs()
    for job in jobs:
        other = (job.metadata or {}).get("run")
        if other and _path(other) == _path(place) and not job.status.is_terminal():
            raise CommandError(
                f"Job {job.submission_id} is at work on {place}. Follow it with `cory jobs logs "
                f"{job.submission_id}`, or stop it first: `cory jobs stop {job.submission_id}`."
            )


def _path(place: str) -> str:
    """Returns a place such that a folder and its URI are the same."""
    return place.removeprefix("file://").rstrip("/")


def details(client: "JobSubmissionClient", job: str) -> "JobDetails":
    """Returns what the cluster knows about a job.

    Raises:
        CommandError: there is no such job.
        ClusterUnavailableError: the cluster refuses to say, or is gone.
    """
    with cluster_errors(client, job):
        return client.get_job_info(job)


def later_details(client: "JobSubmissionClient", job: str) -> "JobDetails":
    """Returns what the cluster knows about a job half a second later, or when it answers again.

    Raises:
        CommandError: there is no such job any more.
        ClusterUnavailableError: the cluster does not say for `RETRY_SECONDS` seconds.
    """

    def tell(error: Exception) -> None:
        print(f"Warning: {error} Asking again for a minute.", file=sys.stderr, flush=True)

    time.sleep(0.5)
    return retry(lambda: details(client, job), RETRY_SECONDS, ClusterUnavailableError, tell)


def follow(client: "JobSubmissionClient", job: str) -> int:
    """Prints a job's output until it ends, and returns the exit code of its driver; 128 + that of a signal's number."""
    info = details(client, job)
    shown = asyncio.run(_print_from(client, job, 0))
    while not info.status.is_terminal():
        info = later_details(client, job)
        shown = asyncio.run(_print_from(client, job, shown))
    if (code := info.driver_exit_code) is not None:
        return 128 - code if code < 0 else code
    if info.status.value == "STOPPED":
        return STOPPED
    if info.status.value != "SUCCEEDED":
        print(f"Error: job {job} failed: {info.message}", file=sys.stderr)
        return 1
    return 0


async def _print_from(client: "JobSubmissionClient", job: str, shown: int) -> int:
    """Prints a job's output after its first `shown` characters while it runs; returns how many there are now."""
    import aiohttp

    position = 0
    texts = aiter(client.tail_job_logs(job))
    while True:
        try:
            text = await anext(texts)
        except (aiohttp.ClientError, RuntimeError, OSError, StopAsyncIteration):
            return max(shown, position)  # or the connection broke: whoever called asks how the job is
        fresh = text[max(shown - position, 0) :]
        position += len(text)
        print(fresh, end="", flush=True)
