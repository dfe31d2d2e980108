"""`cory jobs`: lists the jobs of a Ray cluster, shows their output, stops them."""

import time
from typing import TYPE_CHECKING

from launch.cluster.client import add_address, answers_told, connect
from launch.cluster.jobs import details, follow, later_details, promise
from launch.console.parser import Parser, run

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient


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
    print(promise(job, info), flush=True)
    while not info.status.is_terminal():
        info = later_details(client, job)
    print(f"{job}: {info.status.value}. `cory jobs logs {job}` shows what it said.")
    return 1 if info.status.value == "FAILED" else 0
