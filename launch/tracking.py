"""Sends a run's numbers to TensorBoard files and, if asked, to Weights & Biases."""

import contextlib
import importlib.util
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from launch.command import CommandError
from launch.records import plain
from launch.run_directory import TENSORBOARD
from policies.settings import Settings


class Tracker(Protocol):
    """Receives the numbers of every update."""

    def log(self, update: int, figures: Mapping[str, float]) -> None:
        """Records the numbers of one update."""

    def close(self) -> None:
        """Writes what is still held back."""


class TensorBoard:
    """TensorBoard event files."""

    def __init__(self, folder: Path, after: int | None) -> None:
        """Opens new event files; TensorBoard then ignores what older ones say of updates later than `after`."""
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=None if after is None else after + 1)

    def log(self, update: int, figures: Mapping[str, float]) -> None:
        """Records the numbers of one update."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, update)
        self._writer.flush()

    def close(self) -> None:
        """Closes the files. A disk that is full by now was reported where the run itself wrote to it."""
        with contextlib.suppress(OSError):
            self._writer.close()


class WeightsAndBiases:
    """One Weights & Biases run, continued under the same id when training is resumed."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        """Opens the run; its id is kept in the run's folder.

        Raises:
            CommandError: Weights & Biases refuses, as without a login.
        """
        import wandb

        remembered = folder / "wandb.id"
        if not remembered.exists():
            remembered.write_text(secrets.token_hex(4))
        try:
            self._run = wandb.init(
                project="cory",
                name=folder.name,
                id=remembered.read_text(),
                resume="allow",
                dir=str(folder),
                config=settings.model_dump(),
            )
        except wandb.Error as error:
            raise CommandError(
                f"Weights & Biases refuses to start: {error} To do without: WANDB_MODE=offline, or wandb=false."
            ) from error

    def log(self, update: int, figures: Mapping[str, float]) -> None:
        """Records the numbers of one update."""
        self._run.log(dict(figures), step=update)

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


def check(settings: Settings) -> None:
    """Refuses, before anything is started, settings whose tracker is not installed.

    Raises:
        CommandError: `wandb=true` without the package.
    """
    if settings.wandb and importlib.util.find_spec("wandb") is None:
        raise CommandError(
            "wandb=true needs the package wandb, which is not installed. Run `pip install wandb`, or set wandb=false."
        )


def open_trackers(folder: Path, settings: Settings, after: int | None) -> list[Tracker]:
    """Opens the trackers of the run in `folder`, which goes on after update `after`, or starts anew."""
    trackers: list[Tracker] = [TensorBoard(folder / TENSORBOARD, after)]
    if settings.wandb:
        trackers.append(WeightsAndBiases(folder, settings))
    return trackers


def flatten(record: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields the finite numbers of a nested record as `policy/llm_1/kl`, value."""
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}/")
        elif not isinstance(value, str | list | tuple | None):
            number = plain(value)
            if isinstance(number, int | float):
                yield f"{prefix}{key}", float(number)
