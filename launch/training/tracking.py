"""Logs a run's metrics to TensorBoard files and, if set, to Weights & Biases or Trackio."""

import contextlib
import importlib.util
import io
import logging
import os
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from launch.console.credentials import mask_passwords
from launch.console.errors import CommandError, describe_error
from launch.run_folder.layout import METRICS, TENSORBOARD, TRACKIO_ID, WANDB_ID
from launch.run_folder.records import Sample, Update, flatten
from policies.rollout.role_mapping import RoleMapping
from policies.settings.settings import Settings

logger = logging.getLogger(__name__)


class Tracker:
    """Logs the metrics of every update."""

    name: str

    def location(self) -> str | None:
        """Where to look at the run, as a sentence for the user; None: nowhere."""
        return None

    def log(self, update: int, metrics: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def log_samples(self, update: int, samples: Sequence[Sample], held_out: bool) -> None:
        """Logs samples of one update, if supported; called before `log`."""

    def close(self, failed: bool) -> None:
        """Flushes buffers, and marks the run as finished or failed."""
        raise NotImplementedError


class TensorBoard(Tracker):
    """TensorBoard event files."""

    name = "TensorBoard"

    def __init__(self, folder: Path, after: int | None) -> None:
        """Creates new event files; TensorBoard then ignores updates later than `after` in older files."""
        from tensorboardX import SummaryWriter

        purge_step = None if after is None else after + 1
        # Without a suffix, names differ by the second, and a second file of that second would replace the first one.
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, filename_suffix=f".{time.time_ns()}")

    def log(self, update: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, update)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


class WeightsAndBiases(Tracker):
    """A Weights & Biases run, continued under the same id when training is resumed.

    Configured by its environment variables, such as WANDB_PROJECT, WANDB_NAME, WANDB_ENTITY and WANDB_RUN_GROUP.
    """

    name = "Weights & Biases"
    _next_update = 0
    """Earlier updates are logged already. Weights & Biases checks this itself."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        """Opens the run, and stores its id in the run's folder."""
        import wandb

        self._library: Any = wandb
        file = folder / WANDB_ID
        if not file.exists():
            file.write_text(secrets.token_hex(4))
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or "cory",
                name=os.environ.get("WANDB_NAME") or folder.name,
                id=file.read_text(),
                resume="allow",
                reinit="create_new",
                dir=os.environ.get("WANDB_DIR") or str(folder),
                config=settings.public_dict(),
            )
        except wandb.Error as error:
            raise CommandError(
                f"Weights & Biases failed to start: {error} Set WANDB_MODE=offline, or tracker=null."
            ) from error

    def location(self) -> str | None:
        if getattr(self._run, "disabled", False):
            return None
        if self._run.url:
            return f"Weights & Biases: {self._run.url}"
        return f"Weights & Biases, offline. To upload it: wandb sync {shlex.quote(str(Path(self._run.dir).parent))}"

    def log(self, update: int, metrics: Mapping[str, Any]) -> None:
        if update >= self._next_update:
            self._run.log(dict(metrics), step=update)

    def log_samples(self, update: int, samples: Sequence[Sample], held_out: bool) -> None:
        rows = [
            [update, sample["query"], response["role"], response["policy"], response["text"], response["task_reward"]]
            for sample in samples
            for response in sample["responses"]
        ]
        columns = ["update", "query", "role", "policy", "response", "task_reward"]
        table = self._library.Table(columns=columns, data=rows)
        self.log(update, {"samples/held_out" if held_out else "samples/training": table})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio(WeightsAndBiases):
    """A Trackio run, continued under its name when training is resumed. Trackio has the interface of wandb.

    Metrics are stored in a local database, shown by `trackio show`. Configured by its environment variables:
    TRACKIO_DIR; TRACKIO_SPACE_ID and TRACKIO_SERVER_URL for a remote dashboard; TRACKIO_PROJECT, by default `cory`.
    """

    name = "Trackio"

    def __init__(self, folder: Path, settings: Settings) -> None:
        """Opens the run, and stores its name in the run's folder."""
        import trackio

        self._library = trackio
        self._project = os.environ.get("TRACKIO_PROJECT") or "cory"
        file = folder / TRACKIO_ID
        is_resumed = file.exists()
        with contextlib.redirect_stdout(io.StringIO()):  # hide its greeting
            self._run = trackio.init(
                project=self._project,
                name=file.read_text(encoding="utf-8") if is_resumed else folder.name,
                config=settings.public_dict(),
                resume="allow" if is_resumed else "never",
                embed=False,
            )
        file.write_text(self._run.name, encoding="utf-8")
        self._next_update = self._run._next_step  # Trackio would store the same update twice

    def location(self) -> str | None:
        return f"Trackio: trackio show --project {shlex.quote(self._project)}"

    def close(self, failed: bool) -> None:
        from trackio import context_vars

        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()
        if context_vars.current_run.get() is self._run:  # otherwise Trackio finishes it again when Python exits
            context_vars.current_run.set(None)


class Trackers:
    """The trackers of a run. A tracker that fails after it was opened is closed, and training continues without it.

    For example, when a job is stopped, Ray also kills the uploading process of Weights & Biases.
    A context manager that closes the trackers, and marks the run as failed after an exception.
    """

    def __init__(self, trackers: Iterable[Tracker] = ()) -> None:
        self._trackers = list(trackers)
        self._uses_wandb = any(tracker.name == WeightsAndBiases.name for tracker in self._trackers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)
        if self._uses_wandb:  # otherwise the process is the user's
            end_services()

    def close(self, failed: bool) -> None:
        self._call_each(lambda tracker: tracker.close(failed))

    def locations(self) -> list[str]:
        """Where to look at the run: a sentence for each external tracker."""
        return [text for tracker in self._trackers if (text := tracker.location()) is not None]

    def log(self, update: int, metrics: Mapping[str, float]) -> None:
        self._call_each(lambda tracker: tracker.log(update, metrics))

    def log_samples(self, update: int, samples: Sequence[Sample], held_out: bool) -> None:
        self._call_each(lambda tracker: tracker.log_samples(update, samples, held_out))

    def _call_each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in tuple(self._trackers):
            try:
                call(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                with contextlib.suppress(Exception):
                    tracker.close(failed=True)
                message, text = mask_passwords(describe_error(error)).rstrip("."), "Training continues without it"
                logger.warning("%s failed (%s). %s; %s has all metrics.", tracker.name, message, text, METRICS)


SERVICES: dict[str, type[WeightsAndBiases]] = {"wandb": WeightsAndBiases, "trackio": Trackio}
"""External trackers by package name, the value of the setting `tracker`."""


def check_trackers(settings: Settings) -> None:
    """Checks that the run's external tracker is installed."""
    name = settings.tracker
    if name is not None and importlib.util.find_spec(name) is None:
        raise CommandError(
            f"tracker={name} requires the package {name}, which is not installed. Run `pip install {name}`, or set "
            "tracker=null."
        )


def open_trackers(folder: Path, settings: Settings, after: int | None) -> Trackers:
    """Opens the trackers of a run that resumes after an update; None: a new run."""
    service = [SERVICES[settings.tracker](folder, settings)] if settings.tracker else []
    return Trackers([TensorBoard(folder / TENSORBOARD, after), *service])


def end_services() -> None:
    """Ends the process of Weights & Biases. Otherwise it is contacted at exit, even if it is dead."""
    if "wandb" in sys.modules:
        import wandb

        with contextlib.suppress(Exception):
            wandb.teardown()


def flat_metrics(line: Update) -> dict[str, float]:
    """Flattens an update's finite metrics, and adds each policy's position (0: pioneer) as `position/llm_1`."""
    metrics = {name: value for name, value in flatten(line) if name != "update" and value is not None}
    if "roles" not in line:
        return metrics
    roles = line["roles"]
    policies = sorted(line["policy"], key=lambda name: (len(name), name))  # llm_10 after llm_9
    positions = {policy: index for index, policy in enumerate(roles.values())}
    if len(policies) > len(roles):  # several teams; `roles` are the first one's
        mapping = RoleMapping(tuple(roles), tuple(policies)).with_pioneer(next(iter(roles.values())))
        positions = {policy: index for team in mapping.teams() for index, policy in enumerate(team.as_dict().values())}
    return metrics | {f"position/{policy}": float(position) for policy, position in positions.items()}
