"""Access to a Ray cluster: the dashboard's job API, and the cluster's nodes."""

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from launch.cluster.placement import Node, make_node
from launch.console.errors import CommandError

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
NOISY_LOGGERS = ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk")
"""Loggers that log every upload and connection: Ray's, and two with levels of their own."""
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
"""A job's environment variable: the seconds before Ray kills the job after a stop request."""
STOP_SECONDS = "3600"
"""Seconds for a stopped job to finish and save its update. Ray's default is 3.

Only a bound for a driver that hangs: updates of large models take many minutes.
"""
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


class ClusterUnavailableError(CommandError):
    """A cluster does not respond, or rejects a request, possibly temporarily. The message has a remedy."""


def set_auth_mode(host: str | None) -> None:
    """Sets RAY_AUTH_MODE, unless it is set: no authentication for a cluster on this machine, a token for others."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled" if host in LOOPBACK_HOSTS else "token")


def connect(address: str | None) -> "JobSubmissionClient":
    """Returns a client for a cluster's jobs.

    Args:
        address: URL of the dashboard; None: RAY_API_SERVER_ADDRESS, or the default.

    Raises:
        CommandError: the address is invalid, there is no cluster, or it rejects the token.
    """
    address = address or os.environ.get("RAY_API_SERVER_ADDRESS", DEFAULT_ADDRESS)
    host = urlsplit(address).hostname
    if not address.startswith(("http://", "https://")) or host is None:
        raise CommandError(f"Invalid dashboard address {address}. Use --address http://HOST:8265.")
    os.environ["RAY_API_SERVER_ADDRESS"] = address  # otherwise RAY_ADDRESS would take precedence
    set_auth_mode(host)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        return JobSubmissionClient(address)
    except ConnectionError as error:
        raise CommandError(
            f"No Ray cluster answers at {address}. Start one with `ray start --head`, or set another with --address."
        ) from error
    except (AuthenticationError, RuntimeError) as error:
        if "oken" not in str(error):
            reason = " ".join(str(error).split())
            raise CommandError(f"{address} is not a Ray cluster that accepts jobs: {reason}") from error
        raise CommandError(
            f"The cluster at {address} rejected this client's token. Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH "
            "to a file with the cluster's token."
        ) from error


@contextlib.contextmanager
def cluster_errors(client: "JobSubmissionClient", job: str | None = None) -> Iterator[None]:
    """Converts errors of requests to a cluster.

    Args:
        client: that makes the requests.
        job: that the requests concern, if any.

    Raises:
        CommandError: the job does not exist.
        ClusterUnavailableError: the cluster rejects the request, or is unreachable.
    """
    from requests import RequestException

    try:
        yield
    except RuntimeError as error:
        lines = str(error).rstrip(". \n").splitlines()
        if job is not None and "status code 404" in lines[0]:
            raise CommandError(f"Job {job} not found. `cory jobs list` shows all jobs.") from error
        reason = " ".join(dict.fromkeys((lines[0], lines[-1])))
        raise ClusterUnavailableError(
            f"The cluster at {client.get_address()} rejected the request: {reason}. See the dashboard's logs on the "
            "head node."
        ) from error
    except (RequestException, ConnectionError) as error:
        raise ClusterUnavailableError(
            f"The cluster at {client.get_address()} no longer responds. If the cluster is gone, so is the job. Submit "
            "it again, to any cluster, with the same --name and --storage, and it resumes from its checkpoint."
        ) from error


def list_cluster_nodes(address: str) -> list[Node]:
    """Lists a cluster's living nodes. The list may be empty just after the head has started.

    Args:
        address: URL of the dashboard.

    Raises:
        CommandError: the cluster does not list its nodes.
    """
    from ray.util.state import list_nodes
    from ray.util.state.exception import RayStateApiException

    try:
        states = list_nodes(address, filters=[("state", "=", "ALIVE")], limit=10_000, raise_on_missing_output=False)
    except RayStateApiException as error:
        raise CommandError(f"{address} cannot list the cluster's nodes: {str(error).splitlines()[0]}") from error
    return [make_node(state.node_ip, state.resources_total or {}) for state in states]
