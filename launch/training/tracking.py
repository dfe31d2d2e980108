"""Sends a run's numbers to TensorBoard files, Ray's metrics endpoint and, if asked, Weights & Biases and MLflow."""

import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from launch.console.credentials import without_passwords
from launch.console.errors import CommandError, reason
from launch.run_folder.layout import METRICS, TENSORBOARD
from launch.run_folder.records import Sample, Update, plain
from launch.training.services import MLflow, Tracker, Trackio, WeightsAndBiases
from policies.models.model_names import AVERAGE
from policies.rollout.role_mapping import RoleMapping
from policies.settings.settings import Settings

POSITION = "position/"
logger = logging.getLogger(__name__)


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
        self.close(failed=kind is not None)

    def close(self, failed: bool) -> None:
        """Tells all of them that the run has ended, or failed."""
        for tracker in self._opened:
            try:
                tracker.close(failed)
            except Exception as error:
                _warn(tracker, error)

    def log(self, update: int, figures: Mapping[str, float]) -> None:
        """Records the numbers of one update."""
        self._tell(lambda tracker: tracker.log(update, figures))

    def show(self, update: int, samples: Sequence[Sample], held_out: bool) -> None:
        """Records sample texts of one update."""
        self._tell(lambda tracker: tracker.show(update, samples, held_out))

    def _tell(self, say: Callable[[Tracker], None]) -> None:
        for tracker in tuple(self._opened):
            try:
                say(tracker)
            except Exception as error:
                self._opened.remove(tracker)
                with contextlib.suppress(Exception):
                    tracker.close(failed=True)
                _warn(tracker, error)


def _warn(tracker: Tracker, error: Exception) -> None:
    said = without_passwords(reason(error)).rstrip(".")
    logger.warning("%s has failed (%s). The run does without it; %s has all numbers.", tracker.name, said, METRICS)


class TensorBoard(Tracker):
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


class Prometheus(Tracker):
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


SERVICES: dict[str, tuple[type[WeightsAndBiases | MLflow], str]] = {
    "wandb": (WeightsAndBiases, "wandb"),
    "mlflow": (MLflow, "mlflow-skinny"),
    "trackio": (Trackio, "trackio"),
}
"""Trackers that are others' programs, and their packages, by the settings that ask for them."""


def check(settings: Settings) -> None:
    """Refuses, before anything is started, settings whose tracker is not there.

    Raises:
        CommandError: `wandb=true`, `mlflow=true` or `trackio=true` without the package, or MLflow without an address.
    """
    for name, (_, package) in SERVICES.items():
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
    own = [TensorBoard(folder / TENSORBOARD, after), Prometheus(folder.name, settings)]
    return Trackers([*own, *open_services(folder, settings)])


def open_services(folder: Path, settings: Settings, group: str | None = None) -> list[Tracker]:
    """Opens the trackers that are others' programs, as far as settings name them.

    Args:
        folder: of the run, which is called after it.
        settings: of the run.
        group: what it is a part of, as a search, beside others in this process; `end_services` when all are closed.

    Raises:
        CommandError: one of them refuses.
    """
    return [kind(folder, settings, group) for name, (kind, _) in SERVICES.items() if getattr(settings, name)]


def end_services() -> None:
    """Ends the processes of trackers of which a group was opened."""
    if "wandb" in sys.modules:
        import wandb

        wandb.teardown()


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
