"""Sends a run's numbers to TensorBoard files, Ray's metrics endpoint and, if asked, Weights & Biases and MLflow."""

import contextlib
import importlib.util
import logging
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, Self

from launch.console.credentials import without_passwords
from launch.console.errors import CommandError, reason
from launch.run_folder.layout import METRICS, MLFLOW_ID, TENSORBOARD, WANDB_ID
from launch.run_folder.records import Update, plain
from policies.models.model_names import AVERAGE
from policies.rollout.role_mapping import RoleMapping
from policies.settings.settings import Settings

POSITION = "position/"
STEP = "update"
"""The metric by which an MLflow run knows its last update."""
logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Receives the numbers of every update."""

    name: str
    """What users know it by."""

    def log(self, update: int, figures: Mapping[str, float]) -> None:
        """Records the numbers of one update."""

    def close(self, failed: bool) -> None:
        """Writes what is still held back, and that the run has ended, or failed."""


class Trackers:
    """The trackers of a run, which ends by none of them: one that fails after it was opened is left out from then on.

    So it is with Weights & Biases in a job that is stopped: Ray ends the process that sends the numbers, too.
    A context, which closes them; an exception that leaves it tells them that the run has failed.
    """

    def __init__(self, opened: Iterable[Tracker]) -> None:
        self._opened = list(opened)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for tracker in self._opened:
            try:
                tracker.close(failed=kind is not None)
            except Exception as error:
                _warn(tracker, error)

    def log(self, update: int, figures: Mapping[str, float]) -> None:
        """Records the numbers of one update."""
        for tracker in tuple(self._opened):
            try:
                tracker.log(update, figures)
            except Exception as error:
                self._opened.remove(tracker)
                with contextlib.suppress(Exception):
                    tracker.close(failed=True)
                _warn(tracker, error)


def _warn(tracker: Tracker, error: Exception) -> None:
    said = without_passwords(reason(error)).rstrip(".")
    logger.warning("%s has failed (%s). The run does without it; %s has all numbers.", tracker.name, said, METRICS)


class TensorBoard:
    """TensorBoard event files."""

    name = "TensorBoard"

    def __init__(self, folder: Path, after: int | None) -> None:
        """Opens new event files; TensorBoard then ignores what older ones say of updates later than `after`."""
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=None if after is None else after + 1)

    def log(self, update: int, figures: Mapping[str, float]) -> None:
        """Records the numbers of one update."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, update)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        """Closes the files. A disk that is full by now was reported where the run itself wrote to it."""
        with contextlib.suppress(OSError):
            self._writer.close()


MEASURED = {
    "task_reward": "Mean task reward of an update's responses",
    "kl": "Mean KL to the reference policy, in nats per response",
    "combined_reward": "Task reward less eval_kl_coef times KL",
}
GROUPS = {
    "policy": ("policy", "by LLM"),
    "role": ("role", "by role"),
    "evaluation": ("held_out", "of each LLM alone, on held-out queries"),
}
"""How a group of figures is called in a metric's name, and described."""
RUN_WIDE = {
    "tokens_per_second": "Response tokens per second of the rollout",
    "weight_version_lag": "Updates by which the weights that sampled are behind those that learned",
    "exchanges": "Role exchanges so far",
}


class Prometheus:
    """Gauges that Ray exports, with its own, at the metrics port of the node that the driver runs on.

    Each is tagged with the run, and with the policy or role it is of. Setting one costs microseconds; where the cluster
    exports nothing, nothing comes of it.
    """

    name = "Prometheus"

    def __init__(self, run: str, settings: Settings) -> None:
        """Declares the gauges; Ray puts `ray_` before their names."""
        from ray.util.metrics import Gauge

        self._run = run
        self._roles = settings.roles
        self._update = Gauge("cory_update", "Updates done", ("run",))
        self._plays = Gauge("cory_plays", "1 for the role that an LLM plays, else 0", ("run", "policy", "role"))
        self._gauges = {name: (Gauge(f"cory_{name}", text, ("run",)), "") for name, text in RUN_WIDE.items()}
        for group, (called, of) in GROUPS.items():
            tag = "role" if group == "role" else "policy"
            for name, text in MEASURED.items():
                gauge = Gauge(f"cory_{called}_{name}", f"{text}, {of}", ("run", tag))
                members = settings.roles if tag == "role" else settings.modules
                if group == "evaluation" and settings.evaluate_average:
                    members = (*members, AVERAGE)
                self._gauges |= {f"{group}/{member}/{name}": (gauge, tag) for member in members}

    def log(self, update: int, figures: Mapping[str, float]) -> None:
        """Sets the gauges."""
        run = {"run": self._run}
        self._update.set(update, run)
        for key, value in figures.items():
            if key in self._gauges:
                gauge, tag = self._gauges[key]
                gauge.set(value, {**run, tag: key.split("/")[1]} if tag else run)
            elif key.startswith(POSITION):
                for position, role in enumerate(self._roles):
                    self._plays.set(position == value, {**run, "policy": key.removeprefix(POSITION), "role": role})

    def close(self, failed: bool) -> None:
        """Does nothing: the gauges end with the process."""


class WeightsAndBiases:
    """One Weights & Biases run, continued under the same id when training is resumed.

    Its own variables, such as WANDB_PROJECT, WANDB_NAME, WANDB_ENTITY and WANDB_RUN_GROUP, say where and how it is
    kept.
    """

    name = "Weights & Biases"

    def __init__(self, folder: Path, settings: Settings) -> None:
        """Opens the run; its id is kept in the run's folder.

        Raises:
            CommandError: Weights & Biases refuses, as without a login.
        """
        import wandb

        remembered = folder / WANDB_ID
        if not remembered.exists():
            remembered.write_text(secrets.token_hex(4))
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or "cory",
                name=os.environ.get("WANDB_NAME") or folder.name,
                id=remembered.read_text(),
                resume="allow",
                dir=os.environ.get("WANDB_DIR") or str(folder),
                config=settings.model_dump(),
            )
        except wandb.Error as error:
            raise CommandError(
                f"Weights & Biases refuses to start: {error} To do without: WANDB_MODE=offline, or wandb=false."
            ) from error

    def log(self, update: int, figures: Mapping[str, float]) -> None:
        """Records the numbers of one update."""
        self._run.log(dict(figures), step=update)

    def close(self, failed: bool) -> None:
        """Ends the run, and the process that sends its numbers."""
        import wandb

        try:
            self._run.finish(exit_code=int(failed))
        finally:
            wandb.teardown()  # else one that has died is asked again when this process ends, or by the next run in it


class MLflow:
    """One MLflow run where MLFLOW_TRACKING_URI says, continued under the same id when training is resumed.

    A thread of MLflow's sends the numbers, so a slow server costs training nothing. One that is gone is asked again for
    a minute (MLFLOW_HTTP_REQUEST_MAX_RETRIES: how often); MLflow then reports on standard error what it could not send.
    """

    name = "MLflow"

    def __init__(self, folder: Path, settings: Settings) -> None:
        """Opens the run; its id is kept in the run's folder.

        Raises:
            CommandError: MLflow refuses, or does not answer.
        """
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # With MLflow's own default, an address that does not answer is reported after four minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "5")
        import mlflow
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        self._last = -1
        remembered = folder / MLFLOW_ID
        try:
            self._client = mlflow.MlflowClient()
            if remembered.exists():
                self._run = remembered.read_text()
                self._client.update_run(self._run, status="RUNNING")
                self._last = int(self._client.get_run(self._run).data.metrics.get(STEP, -1))
                return
            experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "cory"))
            self._run = self._client.create_run(experiment.experiment_id, run_name=folder.name).info.run_id
            params = [Param(name, str(value)) for name, value in settings.model_dump().items()]
            self._client.log_batch(self._run, params=params)
            remembered.write_text(self._run)
        except MlflowException as error:
            said = without_passwords(str(error).splitlines()[0])
            raise CommandError(f"MLflow refuses to start: {said} To do without: mlflow=false.") from error

    def log(self, update: int, figures: Mapping[str, float]) -> None:
        """Records the numbers of one update, unless it was done before the run went back to a checkpoint."""
        from mlflow.entities import Metric

        if update <= self._last:
            return  # MLflow would keep both
        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, update) for name, value in {STEP: update, **figures}.items()]
        self._client.log_batch(self._run, metrics=metrics, synchronous=False)

    def close(self, failed: bool) -> None:
        """Waits until all numbers are sent, and ends the run."""
        import mlflow
        from mlflow.exceptions import MlflowException

        mlflow.flush_async_logging()
        with contextlib.suppress(MlflowException):
            self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


def check(settings: Settings) -> None:
    """Refuses, before anything is started, settings whose tracker is not there.

    Raises:
        CommandError: `wandb=true` or `mlflow=true` without the package, or MLflow without an address.
    """
    for name, package in (("wandb", "wandb"), ("mlflow", "mlflow-skinny")):
        if getattr(settings, name) and importlib.util.find_spec(name) is None:
            raise CommandError(
                f"{name}=true needs the package {package}, which is not installed. Run `pip install {package}`, or set "
                f"{name}=false."
            )
    if settings.mlflow and not os.environ.get("MLFLOW_TRACKING_URI"):
        raise CommandError(
            "mlflow=true needs MLFLOW_TRACKING_URI: the address of a tracking server, such as http://host:5000, or of "
            "a database, such as sqlite:////shared/mlflow.db. Set it, or set mlflow=false."
        )


def open_trackers(folder: Path, settings: Settings, after: int | None) -> Trackers:
    """Opens the trackers of the run in `folder`, which goes on after update `after`, or starts anew.

    Raises:
        CommandError: one of them refuses.
    """
    trackers: list[Tracker] = [TensorBoard(folder / TENSORBOARD, after), Prometheus(folder.name, settings)]
    if settings.wandb:
        trackers.append(WeightsAndBiases(folder, settings))
    if settings.mlflow:
        trackers.append(MLflow(folder, settings))
    return Trackers(trackers)


def figures_of(line: Update) -> dict[str, float]:
    """Returns an update's finite numbers, and each policy's position in its chain (0: pioneer) as `position/llm_1`."""
    figures = {name: value for name, value in flatten(line) if name != "update"}
    if "roles" not in line:
        return figures
    roles = line["roles"]
    policies = sorted(line["policy"], key=lambda name: (len(name), name))  # llm_10 after llm_9
    first = RoleMapping(tuple(roles), tuple(policies)).led_by(next(iter(roles.values())))
    places = {policy: k for team in first.teams() for k, policy in enumerate(team.as_dict().values())}
    return figures | {f"{POSITION}{policy}": float(place) for policy, place in places.items()}


def flatten(record: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields the finite numbers of a nested record as `policy/llm_1/kl`, value."""
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}/")
        elif not isinstance(value, str | list | tuple | None):
            number = plain(value)
            if isinstance(number, int | float):
                yield f"{prefix}{key}", float(number)
