"""`cory jobs`: lists the jobs of a Ray cluster, shows their output, stops them."""

import time
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from launch.cluster.client import STOP_WAIT, cluster_errors, connect
from launch.cluster.jobs import follow_job, job_details, poll_job_details
from launch.console.cli import Address, Debug
from launch.console.errors import CommandError

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient


def jobs(
    action: Annotated[Literal["list", "logs", "stop"], typer.Argument(help="Action.")] = "list",
    job: Annotated[str | None, typer.Argument(metavar="ID", help="Job id, for logs and stop.")] = None,
    address: Address = None,
    debug: Debug = False,
) -> int:
    """List the jobs of a Ray cluster, show their output, stop them.

    `logs` follows the output of a job and exits with its exit code. `stop` lets a training run started by
    `cory submit` finish its update and save a checkpoint first; other jobs end at once.

    Examples:
      cory jobs
      cory jobs logs raysubmit_1
      cory jobs stop raysubmit_1 --address http://head:8265
    """
    if (job is None) != (action == "list"):
        raise CommandError("Write `cory jobs`, `cory jobs logs ID` or `cory jobs stop ID`.")
    client = connect(address)
    if job is None:
        return _list(client)
    return follow_job(client, job) if action == "logs" else _stop(client, job)


def _list(client: "JobSubmissionClient") -> int:
    from rich.console import Console
    from rich.table import Table

    with cluster_errors(client):
        all_jobs = client.list_jobs()
    table = Table("job", "name", "status", "started", "command", box=None, pad_edge=False)
    for job in sorted((job for job in all_jobs if job.submission_id), key=lambda job: job.start_time or 0):
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((job.start_time or 0) / 1000))
        name = (job.metadata or {}).get("job_name", "")
        table.add_row(job.submission_id, name, job.status.value, started, job.entrypoint)
    Console(width=10_000, soft_wrap=True, highlight=False, markup=False, emoji=False).print(table)
    return 0


def _stop(client: "JobSubmissionClient", job: str) -> int:
    info = job_details(client, job)
    if info.status.is_terminal():
        print(f"{job} has already ended: {info.status.value}.")
        return 0
    with cluster_errors(client, job):
        client.stop_job(job)
    # Set by `cory submit`; otherwise Ray kills the job after 3 seconds.
    waits = STOP_WAIT in (info.runtime_env or {}).get("env_vars", {})
    message = f"Stopping {job}." + (" The training run finishes and saves its update first." if waits else "")
    print(message, flush=True)
    while not info.status.is_terminal():
        info = poll_job_details(client, job)
    print(f"{job}: {info.status.value}. `cory jobs logs {job}` shows its output.")
    return 1 if info.status.value == "FAILED" else 0
