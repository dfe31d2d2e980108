"""Sends a run's numbers to TensorBoard files and, if asked, to Weights & Biases and Trackio."""

import contextlib
import importlib.util
import io
import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from launch.console.credentials import without_passwords
from launch.console.errors import CommandError, describe_error
from launch.run_folder.layout import METRICS, TENSORBOARD, TRACKIO_ID, WANDB_ID
from launch.run_folder.records import Sample, Update, to_json
from policies.rollout.role_mapping import RoleMapping
from policies.settings.settings import Settings

POSITION_PREFIX = "position/"
SAMPLE_COLUMNS = ("update", "query", "role", "policy", "response", "task_reward")
"""Of a table of sample texts."""
logger = logging.getLogger(__name__)


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
                config=settings.public_dict(),
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
        table = self._library.Table(columns=list(SAMPLE_COLUMNS), data=rows)
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
                config=settings.public_dict(),
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
    said = without_passwords(describe_error(error)).rstrip(".")
    logger.warning("%s has failed (%s). The run does without it; %s has all numbers.", tracker.name, said, METRICS)


SERVICES: dict[str, type[WeightsAndBiases]] = {"wandb": WeightsAndBiases, "trackio": Trackio}
"""Trackers that are others' programs, by their packages, which are the settings that ask for them too."""


def check(settings: Settings) -> None:
    """Refuses, before anything is started, settings whose tracker is not installed.

    Raises:
        CommandError: `wandb=true` or `trackio=true` without the package.
    """
    for name in SERVICES:
        if getattr(settings, name) and importlib.util.find_spec(name) is None:
            raise CommandError(
                f"{name}=true needs the package {name}, which is not installed. Run `pip install {name}`, or set "
                f"{name}=false."
            )


def open_trackers(folder: Path, settings: Settings, after: int | None) -> Trackers:
    """Opens the trackers of the run in `folder`, which goes on after update `after`, or starts anew.

    Raises:
        CommandError: one of them refuses.
    """
    return Trackers([TensorBoard(folder / TENSORBOARD, after), *open_services(folder, settings)])


def open_services(folder: Path, settings: Settings, group: str | None = None) -> list[Tracker]:
    """Opens the trackers that are others' programs, as far as settings name them.

    Args:
        folder: of the run, which is called after it.
        settings: of the run.
        group: what it is a part of, as a search, beside others in this process; `end_services` when all are closed.

    Raises:
        CommandError: one of them refuses.
    """
    return [kind(folder, settings, group) for name, kind in SERVICES.items() if getattr(settings, name)]


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
    first = RoleMapping(tuple(roles), tuple(policies)).with_pioneer(next(iter(roles.values())))
    places = {policy: k for team in first.teams() for k, policy in enumerate(team.as_dict().values())}
    return figures | {f"{POSITION_PREFIX}{policy}": float(place) for policy, place in places.items()}


def flatten(record: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields the finite numbers of a nested record as `policy/llm_1/kl`, value."""
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}/")
        elif not isinstance(value, str | list | tuple | None):
            number = to_json(value)
            if isinstance(number, int | float):
                yield f"{prefix}{key}", float(number)
