"""The process around a run: libraries that keep quiet, and Ray."""

import contextlib
import logging
import os
import shutil
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar
from urllib.parse import urlsplit

from launch.command import IN_JOB, OWN_PACKAGES, CommandError, is_defect
from launch.secrets import on_workers
from policies.placement import processes
from policies.settings import Settings

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
T = TypeVar("T")
STDOUT, STDERR = 1, 2
REACHED = 10.0
"""Seconds in which a cluster's head has to take a connection."""
STARTED = 120.0
"""Seconds in which a node that is started here has to be up."""
PATIENCE = 60.0
"""Seconds in which a network or a server may come back, for who only follows what goes on elsewhere."""
UNCHECKED = "CORY_UNCHECKED"
"""The variable of a job on a cluster that grows: what it asks for may be more than there is, and is waited for."""
LOWERED = {
    "driver": "gpus_per_learner",
    "runner": "runner_threads, gpus_per_runner (and tensor_parallel with it) or runner_resources",
    "learner": "gpus_per_learner or learner_resources",
}
"""Settings by which each kind of process asks for less."""


def quiet_libraries(debug: bool) -> None:
    """Sets what libraries read when they are imported; call it before they are. What the user has set stays.

    Args:
        debug: leave logs, warnings and progress bars as they are.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # else idle threads of one process slow the others down
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not _cluster_given():
        # Else Ray leaves a token file that other clusters stumble over.
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        # Else its ports are open to the network: Ray's word for a cluster of one machine, which only listens to itself.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        # Else Ray's processes starve beside any other load (they run at 15), and waits for them run out.
        os.environ.setdefault("RAY_worker_niceness", "0")
    if debug:
        return
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")


def own_output() -> TextIO:
    """Returns a stream of its own to standard output, which `output_into` leaves alone."""
    sys.stdout.flush()
    return os.fdopen(os.dup(STDOUT), "w", encoding=sys.stdout.encoding, errors="replace")


@contextlib.contextmanager
def output_into(file: Path) -> Iterator[None]:
    """Appends what this process and its children print to a file: the C++ and threads of Ray heed no other setting."""
    kept = [os.dup(descriptor) for descriptor in (STDOUT, STDERR)]
    with file.open("ab") as log:
        _point_output_to([log.fileno(), log.fileno()])
    try:
        yield
    finally:
        _point_output_to(kept)
        for descriptor in kept:
            os.close(descriptor)


def _point_output_to(targets: Sequence[int]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    for target, descriptor in zip(targets, (STDOUT, STDERR), strict=True):
        os.dup2(target, descriptor)


class Heard(logging.Handler):
    """Passes this project's own warnings on to the user."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        """Tells the user."""
        self._tell(f"{record.levelname.capitalize()}: {record.getMessage()}")


@contextlib.contextmanager
def warnings_told(tell: Callable[[str], None]) -> Iterator[None]:
    """Lets `tell` hear the warnings that this project's packages log in this process."""
    heard = Heard(tell)
    loggers = [logging.getLogger(name) for name in OWN_PACKAGES]
    for logger in loggers:
        logger.addHandler(heard)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(heard)


@contextlib.contextmanager
def ray_session(settings: Settings, debug: bool, patience: float = 0.0) -> Iterator[None]:
    """Joins the Ray cluster that the environment names (inside a Ray job, its own), or starts one on this machine.

    A cluster that was started here ends with the context, and so does the folder that its processes have for temporary
    files, with Ray's logs in it, unless a defect makes them worth a look.

    Args:
        settings: of the run.
        debug: show Ray's logs.
        patience: seconds in which Ray may still start, and the cluster get the CPUs and GPUs that it lacks.

    Raises:
        CommandError: the cluster does not answer, or has fewer CPUs or GPUs than the settings ask for; Ray would wait
            for more, as it is to with `UNCHECKED`.
    """
    import ray

    with contextlib.ExitStack() as ending:
        where: dict[str, Any] = {}
        if _cluster_given():
            where["runtime_env"] = on_workers()
        else:
            where = {
                "address": "local",
                "num_cpus": max(os.cpu_count() or 1, logical_cpus(settings)),
                "include_dashboard": False,
                "_temp_dir": ending.enter_context(_temporary_folder()),
            }
        ending.callback(ray.shutdown)

        def begin() -> None:
            try:
                join(log_to_driver=debug, logging_level=logging.INFO if debug else logging.ERROR, **where)
                if UNCHECKED not in os.environ:
                    check_resources(settings, ray.cluster_resources())
                    check_nodes(settings, living_nodes())
            except Exception:
                ray.shutdown()
                raise

        patiently(begin, patience)
        yield


def join(**options: Any) -> None:
    """Calls `ray.init`.

    Args:
        options: of `ray.init`.

    Raises:
        CommandError: RAY_ADDRESS names a cluster that does not answer.
    """
    import ray

    try:
        if "address" not in options and "RAY_ADDRESS" in os.environ:
            _reach(os.environ["RAY_ADDRESS"])
        with _slow_start():
            ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        if "RAY_ADDRESS" not in os.environ:
            raise
        said = str(error).splitlines()[0].rstrip(".")
        raise CommandError(
            f"No Ray cluster answers at RAY_ADDRESS={os.environ['RAY_ADDRESS']}: {said}. Correct it, or unset it to "
            "use this machine."
        ) from error


@contextlib.contextmanager
def _slow_start() -> Iterator[None]:
    """Gives a node that Ray starts here `STARTED` seconds; its own 30 are fixed, and too few on a busy machine."""
    from ray._private import services

    look = services.get_node

    def wait(*arguments: Any) -> Any:
        deadline = time.monotonic() + STARTED
        while True:
            try:
                return look(*arguments)
            except RuntimeError:  # it has not registered yet
                if time.monotonic() >= deadline:
                    raise
            time.sleep(0.5)

    services.get_node = wait
    try:
        yield
    finally:
        services.get_node = look


def _reach(address: str) -> None:
    """Connects to a cluster's host and port, as Ray goes on asking for minutes where nothing listens.

    Args:
        address: `HOST:PORT` or `ray://HOST:PORT`; words such as `auto`, which have no port, are left to Ray.

    Raises:
        ConnectionError: nothing listens there, or does not answer in time.
        ValueError: the port is no number.
    """
    place = urlsplit(address if "://" in address else f"//{address}")
    if place.port is None:
        return
    try:
        socket.create_connection((place.hostname or "", place.port), timeout=REACHED).close()
    except OSError as error:
        raise ConnectionError(error.strerror or str(error)) from error


def patiently(
    step: Callable[[], T],
    seconds: float,
    passing: type[Exception] = Exception,
    tell: Callable[[Exception], None] = lambda error: None,
) -> T:
    """Does something again and again until it succeeds, or fails after so many seconds; with 0 once.

    Args:
        step: what is done.
        seconds: in which it may fail.
        passing: what may pass; other exceptions are raised at once.
        tell: is told of the first failure.

    Returns:
        What `step` returns.

    Raises:
        Exception: the last one that `step` raised.
    """
    deadline = time.monotonic() + seconds
    failed = False
    while True:
        try:
            return step()
        except passing as error:
            if time.monotonic() >= deadline:
                raise
            if not failed:
                tell(error)
            failed = True
        time.sleep(2.0)


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    """Yields a folder that is also the temporary folder of all processes started meanwhile."""
    usual = os.environ.get("RAY_TMPDIR", tempfile.gettempdir())
    # What torch compiles is worth keeping from run to run.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
    # Ray's sockets lie some 75 characters below, and their paths may have 107.
    folder = tempfile.mkdtemp(prefix="cory-", dir=usual if len(usual) <= 20 and os.path.isdir(usual) else "/tmp")
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = folder
    keep = False
    try:
        yield folder
    except Exception as error:
        keep = is_defect(error)
        if keep:
            error.add_note(f"Ray's logs are in {folder}.")
        raise
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def check_resources(settings: Settings, found: Mapping[str, float]) -> None:
    """Refuses a run that Ray could not place.

    Raises:
        CommandError: `found`, the cluster's resources, are fewer than the settings ask for.
    """
    if gpus(settings) > found.get("GPU", 0):
        raise CommandError(
            f"gpus_per_runner and gpus_per_learner ask for {gpus(settings):g} GPUs in all, but Ray finds "
            f"{found.get('GPU', 0):g}. Lower them, num_runners or num_learners."
        )
    cpus = logical_cpus(settings)
    if cpus > found.get("CPU", 0):
        raise CommandError(
            f"The driver, runners and learners ask for {cpus} CPUs in all, but the Ray cluster has "
            f"{found.get('CPU', 0):g}. Lower num_runners, runner_threads or num_learners."
        )
    kinds = processes(settings)
    for name in sorted({name for kind in kinds for name in kind.custom}):
        total = sum(kind.count * kind.custom.get(name, 0) for kind in kinds)
        if total > found.get(name, 0):
            raise CommandError(
                f"runner_resources and learner_resources ask for {total:g} of `{name}` in all, but the Ray cluster has "
                f"{found.get(name, 0):g}. Start nodes that have it (`ray start --resources`), or lower them."
            )


def check_driver(settings: Settings, own: float = 0.0) -> None:
    """Refuses a driver that learns on a GPU of which Ray does not know, and which it gives to runners too.

    Nothing is amiss in a trial of a search, for whose driver Ray is asked for a GPU, or where all share one GPU.

    Args:
        settings: of the run.
        own: the GPUs that Ray was asked for the driver, as a job's.

    Raises:
        CommandError: runners and the driver do not fit on one GPU.
    """
    learns = settings.gpus_per_learner if settings.num_learners == 0 else 0
    generate = settings.num_runners * settings.gpus_per_runner
    if learns > own and generate and learns + generate > 1:
        raise CommandError(
            f"With num_learners=0 the driver learns on the first GPU, which Ray gives to runners too, and "
            f"gpus_per_learner={learns:g} and gpus_per_runner={settings.gpus_per_runner:g} do not fit on one. Set "
            "num_learners=1."
        )


def living_nodes() -> list[dict[str, float]]:
    """Returns the resources of each living node of the present Ray."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def check_nodes(settings: Settings, found: Sequence[Mapping[str, float]]) -> None:
    """Refuses a run with a process that no single node has room for: Ray would wait for such a node.

    Args:
        settings: of the run.
        found: the resources of each node.

    Raises:
        CommandError: no node has what the process asks for, which the message names.
    """
    for kind in processes(settings):
        asked = {"CPU": kind.cpus, "GPU": kind.gpus, **kind.custom}
        if (missing := missing_on_one(asked, found)) is not None:
            raise CommandError(
                f"A {kind.name} asks for {in_words(asked)}, and no node of the Ray cluster has that ({missing}). Lower "
                f"{LOWERED[kind.name]}, or add such a node."
            )


def missing_on_one(asked: Mapping[str, float], found: Sequence[Mapping[str, float]]) -> str | None:
    """Returns what no node has of the resources that one must have all of, or None where one has.

    Args:
        asked: how much of each resource.
        found: the resources of each node.
    """
    if any(all(node.get(key, 0) >= amount for key, amount in asked.items()) for node in found):
        return None
    most = {key: max((node.get(key, 0) for node in found), default=0) for key in asked}
    lacking = [f"{key}: at most {most[key]:g} on one" for key, amount in asked.items() if most[key] < amount]
    return ", ".join(lacking) or "not all on one"


def in_words(resources: Mapping[str, float]) -> str:
    """Returns `CPU=2, tpu=1`, without what there is none of."""
    return ", ".join(f"{key}={amount:g}" for key, amount in resources.items() if amount)


def logical_cpus(settings: Settings) -> int:
    """Returns the CPUs that Ray must have to place everything: the driver, and each runner's and learner's own."""
    return int(sum(process.count * process.cpus for process in processes(settings)))


def gpus(settings: Settings) -> float:
    """Returns the GPUs of all runners and learners; a learner in the driver has one too."""
    return settings.num_runners * settings.gpus_per_runner + max(settings.num_learners, 1) * settings.gpus_per_learner


def _cluster_given() -> bool:
    return "RAY_ADDRESS" in os.environ or IN_JOB in os.environ
