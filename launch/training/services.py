"""Trackers that are others' programs: Weights & Biases, Trackio, MLflow."""

import contextlib
import io
import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from launch.console.credentials import without_passwords
from launch.console.errors import CommandError
from launch.run_folder.layout import MLFLOW_ID, TRACKIO_ID, WANDB_ID
from launch.run_folder.records import Sample
from policies.settings.settings import Settings

STEP = "update"
"""The metric by which an MLflow run knows its last update."""
COLUMNS = ("update", "query", "role", "policy", "response", "task_reward")
"""Of a table of sample texts."""


class Tracker(Protocol):
    """Receives the numbers of every update."""

    name: str
    """What users know it by."""

    def log(self, update: int, figures: Mapping[str, float]) -> None:
        """Records the numbers of one update."""

    def show(self, update: int, samples: Sequence[Sample], held_out: bool) -> None:
        """Records sample texts of one update, if it can; before its numbers."""
        return

    def close(self, failed: bool) -> None:
        """Writes what is still held back, and that the run has ended, or failed."""


class WeightsAndBiases(Tracker):
    """One Weights & Biases run, continued under the same id when training is resumed.

    Its own variables, such as WANDB_PROJECT, WANDB_NAME, WANDB_ENTITY and WANDB_RUN_GROUP, say where and how it is
    kept.
    """

    name = "Weights & Biases"

    def __init__(self, folder: Path, settings: Settings, group: str | None = None) -> None:
        """Opens the run; what it is known by is kept in the run's folder.

        Args:
            folder: the run's.
            settings: of the run.
            group: what it is a part of, beside others in this process (`launch.training.tracking.open_services`).

        Raises:
            CommandError: the tracker refuses, as without a login.
        """
        self._alone = group is None
        self._next = 0  # the first update that it does not hold yet, unless it sees to that by itself
        self._open(folder, settings, group)

    def _open(self, folder: Path, settings: Settings, group: str | None) -> None:
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
                group=os.environ.get("WANDB_RUN_GROUP") or group,
                reinit="create_new",  # others of its group may be open
                dir=os.environ.get("WANDB_DIR") or str(folder),
                config=settings.told(),
            )
        except wandb.Error as error:
            raise CommandError(
                f"Weights & Biases refuses to start: {error} To do without: WANDB_MODE=offline, or wandb=false."
            ) from error

    def log(self, update: int, figures: Mapping[str, float]) -> None:
        """Records the numbers of one update, unless it was done before the run went back to a checkpoint."""
        if update >= self._next:
            self._run.log(dict(figures), step=update)

    def show(self, update: int, samples: Sequence[Sample], held_out: bool) -> None:
        """Records sample texts of one update, as a table."""
        rows = [
            [update, sample["query"], response["role"], response["policy"], response["text"], response["task_reward"]]
            for sample in samples
            for response in sample["responses"]
        ]
        table = self._library.Table(columns=list(COLUMNS), data=rows)
        self.log(update, {"samples/held_out" if held_out else "samples/training": table})

    def close(self, failed: bool) -> None:
        """Ends the run, and the process that sends its numbers."""
        try:
            self._run.finish(exit_code=int(failed))
        finally:
            if self._alone:
                self._library.teardown()  # else one that has died is asked again when this process ends


class Trackio(WeightsAndBiases):
    """One Trackio run, continued under its name when training is resumed. Trackio has the interface of the above.

    It keeps numbers in a database on this machine, which `trackio show` draws in a browser. Its own variables say where
    numbers go: TRACKIO_DIR, or TRACKIO_SPACE_ID and TRACKIO_SERVER_URL for a dashboard elsewhere; TRACKIO_PROJECT the
    project, else `cory`.
    """

    name = "Trackio"

    def _open(self, folder: Path, settings: Settings, group: str | None) -> None:
        import trackio

        self._library = trackio
        file = folder / TRACKIO_ID
        known = file.exists()
        with contextlib.redirect_stdout(io.StringIO()):  # its greeting
            self._run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT") or "cory",
                name=file.read_text(encoding="utf-8") if known else folder.name,
                group=group,
                config=settings.told(),
                resume="allow" if known else "never",
                embed=False,
            )
        file.write_text(self._run.name, encoding="utf-8")
        self._next = self._run._next_step  # it would keep both of two that are of one update

    def close(self, failed: bool) -> None:
        """Waits until all numbers are written."""
        from trackio import context_vars

        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()
        if context_vars.current_run.get() is self._run:  # which Trackio finishes when Python ends
            context_vars.current_run.set(None)


class MLflow(Tracker):
    """One MLflow run where MLFLOW_TRACKING_URI says, continued under the same id when training is resumed.

    MLFLOW_EXPERIMENT_NAME says in which experiment (else `cory`), MLFLOW_TAGS, a JSON object, with which tags.

    A thread of MLflow's sends the numbers, so a slow server costs training nothing. One that is gone is asked again for
    a minute (MLFLOW_HTTP_REQUEST_MAX_RETRIES: how often); MLflow then reports on standard error what it could not send.
    """

    name = "MLflow"

    def __init__(self, folder: Path, settings: Settings, group: str | None = None) -> None:
        """Opens the run; its id is kept in the run's folder.

        Args:
            folder: the run's.
            settings: of the run.
            group: what it is a part of; it is tagged with that.

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
            tags = mlflow_tags(settings) | ({"group": group} if group else {})
            experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "cory"))
            made = self._client.create_run(experiment.experiment_id, run_name=folder.name, tags=tags)
            self._run = made.info.run_id
            params = [Param(name, str(value)) for name, value in settings.told().items()]
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


def mlflow_tags(settings: Settings) -> dict[str, str]:
    """Returns what an MLflow run is tagged with: what it trains, and what MLFLOW_TAGS holds.

    Raises:
        CommandError: that is no JSON object.
    """
    own = os.environ.get("MLFLOW_TAGS") or "{}"
    try:
        asked = {str(name): str(value) for name, value in json.loads(own).items()}
    except (ValueError, AttributeError) as error:
        raise CommandError(f'MLFLOW_TAGS must be a JSON object such as {{"team": "a"}}, not {own}') from error
    agents = str(settings.num_agents)
    return {
        "task": settings.task,
        "model": settings.started_from,
        "algorithm": settings.algorithm,
        "agents": agents,
    } | asked
