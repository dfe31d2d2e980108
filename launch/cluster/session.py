"""The process around a run: libraries that keep quiet, and Ray."""

import contextlib
import logging
import os
import shutil
import socket
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from filelock import FileLock

from cory_env.shadowing import shadowing_modules
from launch.cluster import placement
from launch.cluster.client import settle_authentication
from launch.console.credentials import on_workers
from launch.console.errors import IN_JOB, CommandError, is_defect
from launch.console.interrupts import hangup_blocked
from launch.console.retry import retry
from policies.compat.ray import lean_start, patient_start
from policies.settings.processes import Process, cpus, processes
from policies.settings.settings import Settings

QUIET = {
    "PYTHONWARNINGS": "ignore",
    "RAY_DEDUP_LOGS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else a warning about a default that will change
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
}
REACHED = 10.0
"""Seconds in which a cluster's head has to take a connection."""
STARTED = 120.0
"""Seconds in which a node that is started here has to be up."""
FOLDER, ALIVE = "cory-", ".alive"
"""How the names of temporary folders begin, and the lock in each that its process holds."""
FOUND_BY_RAY = ("auto", "local")
"""Words instead of an address, for clusters whose authentication Ray knows."""
UNCHECKED = "CORY_UNCHECKED"
"""The variable of a job on a cluster that grows: what it asks for may be more than there is, and is waited for."""


def quiet_libraries(debug: bool) -> None:
    """Sets what libraries read when they are imported; call it before they are. What the user has set stays.

    Args:
        debug: leave logs, warnings and progress bars as they are.

    Raises:
        CommandError: there are no docstrings, without which Ray cannot be imported.
    """
    if sys.flags.optimize > 1:
        raise CommandError("Ray needs docstrings. Run Python without -OO, and without PYTHONOPTIMIZE=2; -O works.")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # else idle threads of one process slow the others down
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not _cluster_given():
        settle_authentication("127.0.0.1")  # else Ray leaves a token file that other clusters stumble over
        # Else its ports are open to the network: Ray's word for a cluster of one machine, which only listens to itself.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        # Else Ray's processes starve beside any other load (they run at 15), and waits for them run out.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # Else Ray starts a Python process per CPU, of which a run needs as many as it has runners and learners.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    elif IN_JOB not in os.environ:
        with contextlib.suppress(ValueError):  # no address at all, as `join` tells
            if (host := _parts(os.environ["RAY_ADDRESS"]).hostname) not in FOUND_BY_RAY:
                settle_authentication(host)
    if debug:
        return
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")


@contextlib.contextmanager
def ray_session(asked: Sequence[Process], debug: bool, patience: float = 0.0) -> Iterator[None]:
    """Joins the Ray cluster that the environment names (inside a Ray job, its own), or starts one on this machine.

    Where this process has joined one already, it stays in that. A cluster that was started here ends with the context,
    and so does the folder that its processes have for temporary files, with Ray's logs in it, unless a defect makes
    them worth a look.

    Args:
        asked: the processes that must find room.
        debug: show Ray's logs.
        patience: seconds in which Ray may still start, and the cluster get the nodes that it lacks.

    Raises:
        CommandError: the cluster does not answer, or has no room for what is asked; Ray would wait for it, as it is to
            with `UNCHECKED`.
    """
    import ray

    if ray.is_initialized():
        _check_room(asked)
        yield
        return
    with contextlib.ExitStack() as ending:
        where: dict[str, Any] = {}
        if _cluster_given():
            where["runtime_env"] = on_workers()
        else:
            where = {
                "address": "local",
                "num_cpus": max(os.cpu_count() or 1, cpus(asked)),
                "include_dashboard": False,
                "_temp_dir": ending.enter_context(_temporary_folder()),
            }
            if shadowing_modules():  # setting workers up takes a second or two
                where["runtime_env"] = on_workers()
        ending.callback(ray.shutdown)

        def begin() -> None:
            try:
                with hangup_blocked():
                    init_ray(log_to_driver=debug, logging_level=logging.INFO if debug else logging.ERROR, **where)
                _check_room(asked)
            except Exception:
                ray.shutdown()
                raise

        retry(begin, patience)
        yield


def _check_room(asked: Sequence[Process]) -> None:
    if UNCHECKED not in os.environ:
        placement.check_placement(asked, placement.alive_nodes())


def init_ray(**options: Any) -> None:
    """Calls `ray.init`.

    Args:
        options: of `ray.init`.

    Raises:
        CommandError: RAY_ADDRESS names a cluster that does not answer, or there is no token for it; or Ray did not
            start here in time.
    """
    import ray
    from ray.exceptions import AuthenticationError

    try:
        if "address" not in options and "RAY_ADDRESS" in os.environ:
            _reach(os.environ["RAY_ADDRESS"])
        with patient_start(STARTED), lean_start() if options.get("address") == "local" else contextlib.nullcontext():
            ray.init(**options)
    except AuthenticationError as error:
        raise CommandError(
            f"No token, or a wrong one, for the cluster at RAY_ADDRESS={os.environ.get('RAY_ADDRESS')}. Set "
            "RAY_AUTH_TOKEN_PATH to a file with the token that it was started with, or RAY_AUTH_MODE=disabled if it "
            "wants none."
        ) from error
    except (ConnectionError, RuntimeError, ValueError) as error:
        if "RAY_ADDRESS" not in os.environ:
            raise
        said = str(error).splitlines()[0].rstrip(".")
        raise CommandError(
            f"No Ray cluster answers at RAY_ADDRESS={os.environ['RAY_ADDRESS']}: {said}. Correct it, or unset it to "
            "use this machine."
        ) from error
    except Exception as error:  # Ray has no type of its own for it
        if "timed out during startup" not in str(error):
            raise
        raise CommandError(
            f"Ray did not start within {STARTED:.0f} s: this machine is too busy, out of memory, or limits what its "
            "processes may do (`ulimit -a`). Lift that, or try again later."
        ) from error


def _reach(address: str) -> None:
    """Connects to a cluster's host and port, as Ray goes on asking for minutes where nothing listens.

    Args:
        address: `HOST:PORT` or `ray://HOST:PORT`; words such as `auto`, which have no port, are left to Ray.

    Raises:
        ConnectionError: nothing listens there, or does not answer in time.
        ValueError: the port is no number.
    """
    parts = _parts(address)
    if parts.port is None:
        return
    try:
        socket.create_connection((parts.hostname or "", parts.port), timeout=REACHED).close()
    except OSError as error:
        raise ConnectionError(error.strerror or str(error)) from error


def _parts(address: str) -> SplitResult:
    """Reads `HOST:PORT` or `ray://HOST:PORT`."""
    return urlsplit(address if "://" in address else f"//{address}")


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    """Yields a folder that is also the temporary folder of all processes started meanwhile.

    Those of processes that were killed go.
    """
    usual = os.environ.get("RAY_TMPDIR", tempfile.gettempdir())
    # What torch compiles is worth keeping from run to run.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
    # Ray's sockets lie some 75 characters below, and their paths may have 107.
    parent = usual if len(usual) <= 20 and os.path.isdir(usual) else "/tmp"
    _remove_abandoned(Path(parent))
    hidden = tempfile.mkdtemp(prefix=f".{FOLDER}", dir=parent)  # until it is locked, as `_remove_abandoned` must see it
    lock = FileLock(f"{hidden}/{ALIVE}", blocking=False, fallback_to_soft=False)
    with contextlib.suppress(OSError):  # a file system without locks
        lock.acquire()
    folder = os.path.join(parent, os.path.basename(hidden)[1:])
    os.rename(hidden, folder)
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = folder
    keep = False
    try:
        yield folder
    except Exception as error:
        keep = is_defect(error)
        if keep:
            os.unlink(f"{folder}/{ALIVE}")  # so that no later start removes them
            error.add_note(f"Ray's logs are in {folder}.")
        raise
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _remove_abandoned(parent: Path) -> None:
    """Removes this user's temporary folders whose process is gone: the kernel then freed its lock."""
    for alive in parent.glob(f"{FOLDER}*/{ALIVE}"):
        with contextlib.suppress(OSError):  # a lock that is held, too
            if alive.parent.lstat().st_uid == os.getuid():
                with FileLock(alive, blocking=False, fallback_to_soft=False):
                    shutil.rmtree(alive.parent, ignore_errors=True)


def check_driver(settings: Settings, own: float = 0.0) -> None:
    """Refuses a driver that works on a GPU of which Ray does not know, and which it gives to other processes too.

    Nothing is amiss in a trial of a search, for whose driver Ray is asked for a GPU, or where all share one GPU.

    Args:
        settings: of the run.
        own: the GPUs that Ray was asked for the driver, as a job's.

    Raises:
        CommandError: the driver and the others do not fit on one GPU.
    """
    driver, *others = processes(settings)
    asked = sum(kind.count * kind.gpus for kind in others)
    if driver.gpus > own and asked and driver.gpus + asked > 1:
        work, kind = ("learns", "learner") if settings.num_learners == 0 else ("generates", "runner")
        raise CommandError(
            f"With num_{kind}s=0 the driver {work} on the first GPU, which Ray gives to {others[0].name}s too, and "
            f"gpus_per_learner={settings.gpus_per_learner:g} and gpus_per_runner={settings.gpus_per_runner:g} do not "
            f"fit on one. Set num_{kind}s=1."
        )


def _cluster_given() -> bool:
    return "RAY_ADDRESS" in os.environ or IN_JOB in os.environ
