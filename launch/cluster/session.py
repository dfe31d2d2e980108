"""Sets up the process of a run: quiet libraries, and a Ray session."""

import contextlib
import logging
import os
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

from cory_env.home import IN_JOB
from cory_env.shadowing import WORKER_SETUP, shadowing_modules
from launch.cluster import placement
from launch.console.errors import CommandError, is_bug
from launch.console.interrupts import hangup_blocked
from policies.compat.ray import node_start_timeout, without_dashboard
from policies.settings.processes import Process, cpus, needs_ray, processes
from policies.settings.settings import Settings

QUIET_ENV = {
    "PYTHONWARNINGS": "ignore",
    "RAY_DEDUP_LOGS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # otherwise Ray warns about a changing default
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
}
CONNECT_TIMEOUT = 10.0
"""Seconds for connecting to a cluster's head."""
START_TIMEOUT = 120.0
"""Seconds for a local Ray node to start."""
RETRY_INTERVAL = 2.0
"""Seconds between two attempts to start or join Ray."""
RAY_ADDRESS_WORDS = ("auto", "local")
"""Values of RAY_ADDRESS that are not addresses; Ray handles authentication for them."""
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
UNCHECKED = "CORY_UNCHECKED"
"""Environment variable for autoscaling clusters: skip the placement check, and wait for nodes."""


def quiet_libraries(debug: bool) -> None:
    """Sets the libraries' environment variables, unless the user has set them. Call it before importing them.

    A cluster on another machine requires a token.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # otherwise idle threads slow down other processes
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not _has_cluster_address():
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # otherwise Ray leaves a token that breaks other clusters
        # With 0, Ray listens on the loopback interface only, and opens no ports to the network.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        # By default, Ray's workers run at niceness 15, starve beside any other load, and time out.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # By default, Ray starts one Python process per CPU, but a run needs one per runner and learner.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    elif IN_JOB not in os.environ:
        with contextlib.suppress(ValueError):  # an invalid address, which `init_ray` reports
            if (host := _split_address(os.environ["RAY_ADDRESS"]).hostname) not in RAY_ADDRESS_WORDS:
                os.environ.setdefault("RAY_AUTH_MODE", "disabled" if host in LOOPBACK_HOSTS else "token")
    if debug:
        return
    for name, value in QUIET_ENV.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")


@contextlib.contextmanager
def run_session(
    required: Sequence[Process], debug: bool, retry_seconds: float = 0.0, *, on_start: Callable[[], None]
) -> Iterator[None]:
    """A `ray_session` if a run's processes need Ray, or if it is on a cluster; else nothing.

    Args:
        on_start: called before Ray starts.
    """
    if not needs_ray(required) and not _has_cluster_address():
        import ray  # sets the level of its loggers, which are RLlib's too

        logging.getLogger(ray.__name__).setLevel(_log_level(debug))
        yield
        return
    on_start()
    with ray_session(required, debug, retry_seconds):
        yield


@contextlib.contextmanager
def ray_session(required: Sequence[Process], debug: bool, retry_seconds: float = 0.0) -> Iterator[None]:
    """Joins the Ray cluster in RAY_ADDRESS (or that of the current Ray job), or starts a local one.

    If this process has joined a cluster already, it is used. A local cluster ends with the context, and its temporary
    folder with Ray's logs is removed, except with `debug` or after an unexpected error.

    Args:
        retry_seconds: seconds to wait for Ray to start, and for missing nodes to join the cluster.
    """
    import ray

    if ray.is_initialized():
        _check_placement(required)
        yield
        return
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {}
        if not _has_cluster_address():
            parent = os.environ.get("RAY_TMPDIR", "/tmp")
            # A socket's path is limited to 107 characters, and Ray's sockets need about 75 below this folder.
            if len(parent) > 20 or not os.path.isdir(parent):
                parent = "/tmp"
            options = {
                "address": "local",
                "num_cpus": max(os.cpu_count() or 1, cpus(required)),
                "include_dashboard": False,
                "_temp_dir": f"{parent}/ray",  # Ray's own default, which keeps its logs
            }
            if not debug:
                options["_temp_dir"] = stack.enter_context(_temporary_folder(parent))
        if _has_cluster_address() or shadowing_modules():  # otherwise save the second or two of a worker setup
            options["runtime_env"] = {"worker_process_setup_hook": WORKER_SETUP}
        stack.callback(ray.shutdown)
        deadline = time.monotonic() + retry_seconds
        while True:
            try:
                with hangup_blocked():
                    init_ray(log_to_driver=debug, logging_level=_log_level(debug), **options)
                _check_placement(required)
                break
            except Exception:
                ray.shutdown()
                if time.monotonic() >= deadline:
                    raise
            time.sleep(RETRY_INTERVAL)
        yield


@contextlib.contextmanager
def _temporary_folder(parent: str) -> Iterator[str]:
    """Yields a temporary folder that is removed, except after an unexpected error."""
    folder = tempfile.mkdtemp(prefix="cory-", dir=parent)
    keep = False
    try:
        yield folder
    except Exception as error:
        if keep := is_bug(error):
            error.add_note(f"Ray's logs are in {folder}.")
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _log_level(debug: bool) -> int:
    return logging.INFO if debug else logging.ERROR


def _check_placement(required: Sequence[Process]) -> None:
    if UNCHECKED not in os.environ:
        placement.check_placement(required, placement.alive_nodes())


def init_ray(**options: Any) -> None:
    """Calls `ray.init` with readable errors."""
    import ray
    from ray.exceptions import AuthenticationError

    try:
        if "address" not in options and "RAY_ADDRESS" in os.environ:
            _check_reachable(os.environ["RAY_ADDRESS"])
        with (
            node_start_timeout(START_TIMEOUT),
            without_dashboard() if options.get("address") == "local" else contextlib.nullcontext(),
        ):
            ray.init(**options)
    except AuthenticationError as error:
        raise CommandError(
            f"Missing or invalid token for the cluster at RAY_ADDRESS={os.environ.get('RAY_ADDRESS')}. Set "
            "RAY_AUTH_TOKEN_PATH to a file with the cluster's token, or RAY_AUTH_MODE=disabled if it requires none."
        ) from error
    except (ConnectionError, RuntimeError, ValueError) as error:
        if "RAY_ADDRESS" not in os.environ:
            raise
        reason = str(error).splitlines()[0].rstrip(".")
        raise CommandError(
            f"No Ray cluster answers at RAY_ADDRESS={os.environ['RAY_ADDRESS']}: {reason}. Correct it, or unset it to "
            "use this machine."
        ) from error
    except Exception as error:  # Ray raises a plain Exception for timeouts
        if "timed out during startup" not in str(error):
            raise
        raise CommandError(
            f"Ray did not start within {START_TIMEOUT:.0f} s. This machine is too busy, out of memory, or limits its "
            "processes (`ulimit -a`). Raise the limits, or try again later."
        ) from error


def _check_reachable(address: str) -> None:
    """Checks that a cluster's port, if the address has one, accepts connections. Ray would retry for minutes."""
    parts = _split_address(address)
    if parts.port is None:
        return
    try:
        socket.create_connection((parts.hostname or "", parts.port), timeout=CONNECT_TIMEOUT).close()
    except OSError as error:
        raise ConnectionError(error.strerror or str(error)) from error


def _split_address(address: str) -> SplitResult:
    """Parses `HOST:PORT` or `ray://HOST:PORT`."""
    return urlsplit(address if "://" in address else f"//{address}")


def check_driver(settings: Settings) -> None:
    """Checks that a driver does not use a GPU that Ray assigns to other processes too.

    Not needed if Ray reserves the driver's GPU, as in a trial of a search or by `ray job submit
    --entrypoint-num-gpus`, or if all processes fit on one GPU.
    """
    driver, *others = processes(settings)
    worker_gpus = sum(kind.count * kind.gpus for kind in others)
    is_reserved = IN_JOB in os.environ and os.environ.get("CUDA_VISIBLE_DEVICES", "") != ""  # set by Ray if reserved
    if driver.gpus and not is_reserved and worker_gpus and driver.gpus + worker_gpus > 1:
        work, kind = ("learns", "learner") if settings.num_learners == 0 else ("generates", "runner")
        raise CommandError(
            f"With num_{kind}s=0 the driver {work} on the first GPU, which Ray assigns to {others[0].name}s too, and "
            f"gpus_per_learner={settings.gpus_per_learner:g} and gpus_per_runner={settings.gpus_per_runner:g} do not "
            f"fit on one GPU. Set num_{kind}s=1."
        )


def _has_cluster_address() -> bool:
    return "RAY_ADDRESS" in os.environ or IN_JOB in os.environ
