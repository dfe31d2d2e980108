"""The way to a Ray cluster: its dashboard, which takes jobs, and what the cluster has."""

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
CHATTY = ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk")
"""Loggers that tell of every upload and connection: Ray's, and two with levels of their own."""
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
"""The variable by which a job says how long Ray lets it end by itself when it is stopped."""
STOP_SECONDS = "3600"
"""How long Ray lets a stopped job finish its update and save it, before it kills it; by itself it waits 3 seconds.

No more than a bound on a driver that hangs: updates of large models take many minutes.
"""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ClusterUnavailableError(CommandError):
    """A cluster does not answer, or not as it should, which may pass; the message says what to do."""


def settle_authentication(host: str | None) -> None:
    """Takes a cluster on this machine to have no authentication, any other to want a token; RAY_AUTH_MODE wins."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled" if host in LOOPBACK else "token")


def connect(address: str | None) -> "JobSubmissionClient":
    """Returns a client for the jobs of a cluster.

    Raises:
        CommandError: nothing answers there, or it refuses the token.
    """
    address = address or os.environ.get("RAY_API_SERVER_ADDRESS", DEFAULT_ADDRESS)
    host = urlsplit(address).hostname
    if not address.startswith(("http://", "https://")) or host is None:
        raise CommandError(f"{address} is not the address of a dashboard. Write --address http://HOST:8265.")
    os.environ["RAY_API_SERVER_ADDRESS"] = address  # else RAY_ADDRESS would win over what was asked for
    settle_authentication(host)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        return JobSubmissionClient(address)
    except ConnectionError as error:
        raise CommandError(
            f"No Ray cluster answers at {address}. Start one with `ray start --head`, or name another with --address."
        ) from error
    except (AuthenticationError, RuntimeError) as error:
        if "oken" not in str(error):
            reason = " ".join(str(error).split())
            raise CommandError(f"{address} is no Ray cluster that takes jobs: {reason}") from error
        raise CommandError(
            f"The cluster at {address} refuses this client's token. Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to "
            "a file with the token that the cluster was started with."
        ) from error


@contextlib.contextmanager
def cluster_errors(client: "JobSubmissionClient", job: str | None = None) -> Iterator[None]:
    """Turns what a cluster answers where it does not do as it is asked into a sentence.

    Args:
        client: that asks.
        job: that it asks about.

    Raises:
        CommandError: there is no such job.
        Unanswered: the cluster refuses, or is gone.
    """
    from requests import RequestException

    try:
        yield
    except RuntimeError as error:
        lines = str(error).rstrip(". \n").splitlines()
        if job is not None and "status code 404" in lines[0]:
            raise CommandError(f"There is no job {job}; `cory jobs list` shows all.") from error
        reason = " ".join(dict.fromkeys((lines[0], lines[-1])))
        raise ClusterUnavailableError(
            f"The cluster at {client.get_address()} refuses: {reason}. The logs of its dashboard, on the "
            "head, say more."
        ) from error
    except (RequestException, ConnectionError) as error:
        raise ClusterUnavailableError(
            f"The cluster at {client.get_address()} no longer answers. If it is gone, so is the job: submit it "
            "again, to another cluster too, with the same --name and --storage, and it goes on where it was saved."
        ) from error


def nodes(address: str) -> list[Node]:
    """Returns the nodes that are alive; none yet of a head that has just started.

    Raises:
        CommandError: the cluster does not say.
    """
    from ray.util.state import list_nodes
    from ray.util.state.exception import RayStateApiException

    try:
        states = list_nodes(address, filters=[("state", "=", "ALIVE")], limit=10_000, raise_on_missing_output=False)
    except RayStateApiException as error:
        raise CommandError(f"{address} does not say what the cluster has: {str(error).splitlines()[0]}") from error
    return [make_node(state.node_ip, state.resources_total or {}) for state in states]
