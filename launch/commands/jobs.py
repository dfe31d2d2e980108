"""`cory jobs`: lists the jobs of a Ray cluster, shows their output, stops them."""

import asyncio
import re
import sys
import time
from typing import TYPE_CHECKING

from launch.cluster.client import STOP_WAIT, Unanswered, add_address, answers_told, connect
from launch.console.parser import Parser, run
from launch.console.patience import PATIENCE, patiently

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

STOPPED = 143
"""Exit code of a job that was stopped: what SIGTERM gives its driver."""
SAVING = re.compile(r"\b(cory |launch\.main )(train|tune|study)\b")
"""Commands that finish an update and save it when they are stopped."""


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Returns:
        0; of `logs`, the exit code of the job; of `stop`, 1 where it failed instead; 2 after a user's mistake.
    """
    parser = Parser(prog="cory jobs", description="List the jobs of a Ray cluster, show their output, stop them.")
    add_address(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    actions = parser.add_subparsers(dest="action", metavar="list | logs ID | stop ID")
    actions.add_parser("list", help="id, name, status, start and command of every job (default)")
    logs = actions.add_parser("logs", help="follow a job's output; ends with the job's exit code")
    stop = actions.add_parser("stop", help="let a job finish its update, save a checkpoint, and end")
    for action in (logs, stop):
        action.add_argument("id", metavar="ID")
    options = parser.parse_args(argv)

    def command() -> int:
        client = connect(options.address)
        if options.action == "logs":
            return follow(client, options.id)
        if options.action == "stop":
            return _stop(client, options.id)
        return _list(client)

    return run(command, debug=options.debug)


def details(client: "JobSubmissionClient", job: str) -> "JobDetails":
    """Returns what the cluster knows about a job.

    Raises:
        CommandError: there is no such job.
        Unanswered: the cluster refuses to say, or is gone.
    """
    with answers_told(client, job):
        return client.get_job_info(job)


def _later_details(client: "JobSubmissionClient", job: str) -> "JobDetails":
    """Returns what the cluster knows about a job half a second later, or when it answers again.

    Raises:
        CommandError: there is no such job any more.
        Unanswered: the cluster does not say for `PATIENCE` seconds.
    """

    def tell(error: Exception) -> None:
        print(f"Warning: {error} Asking again for a minute.", file=sys.stderr, flush=True)

    time.sleep(0.5)
    return patiently(lambda: details(client, job), PATIENCE, Unanswered, tell)


def follow(client: "JobSubmissionClient", job: str) -> int:
    """Prints a job's output until it ends, and returns the exit code of its driver; 128 + that of a signal's number."""
    info = details(client, job)
    shown = asyncio.run(_print_from(client, job, 0))
    while not info.status.is_terminal():
        info = _later_details(client, job)
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


def _list(client: "JobSubmissionClient") -> int:
    with answers_told(client):
        jobs = client.list_jobs()
    found = sorted((job for job in jobs if job.submission_id), key=lambda job: job.start_time or 0)
    rows = [("job", "name", "status", "started", "command")]
    for job in found:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((job.start_time or 0) / 1000))
        name = (job.metadata or {}).get("job_name", "")
        rows.append((job.submission_id, name, job.status.value, started, job.entrypoint))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    for *cells, command in rows if found else []:
        print("  ".join([*(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)), command]))
    if not found:
        print(f"No jobs at {client.get_address()}.")
    return 0


def _stop(client: "JobSubmissionClient", job: str) -> int:
    info = details(client, job)
    if info.status.is_terminal():
        print(f"{job} has ended already: {info.status.value}.")
        return 0
    with answers_told(client, job):
        client.stop_job(job)
    print(_promise(job, info), flush=True)
    while not info.status.is_terminal():
        info = _later_details(client, job)
    print(f"{job}: {info.status.value}. `cory jobs logs {job}` shows what it said.")
    return 1 if info.status.value == "FAILED" else 0


def _promise(job: str, info: "JobDetails") -> str:
    """Returns what becomes of a job that is stopped."""
    if info.status.value == "PENDING":
        return f"{job} has not started: it ends when Ray has found a place for its driver."
    if not SAVING.search(info.entrypoint):
        return f"{job} is told to end."
    if STOP_WAIT not in (info.runtime_env or {}).get("env_vars", {}):
        return f"{job} has 3 seconds to save its update, as it was sent without {STOP_WAIT}; then Ray kills it."
    return f"{job} finishes its update and saves it."
