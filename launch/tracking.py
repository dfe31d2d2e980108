"""Sends a run's numbers to TensorBoard files, to Ray's metrics endpoint and, if asked, to Weights & Biases."""

import contextlib
import importlib.util
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from launch.command import CommandError
from launch.records import Update, plain
from launch.run_directory import TENSORBOARD, WANDB_ID
from policies.settings import Settings

PLACE = "place/"


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
                self._gauges |= {f"{group}/{member}/{name}": (gauge, tag) for member in members}

    def log(self, update: int, figures: Mapping[str, float]) -> None:
        """Sets the gauges."""
        run = {"run": self._run}
        self._update.set(update, run)
        for key, value in figures.items():
            if key in self._gauges:
                gauge, tag = self._gauges[key]
                gauge.set(value, {**run, tag: key.split("/")[1]} if tag else run)
            elif key.startswith(PLACE):
                for place, role in enumerate(self._roles):
                    self._plays.set(place == value, {**run, "policy": key.removeprefix(PLACE), "role": role})

    def close(self) -> None:
        """Does nothing: the gauges end with the process."""


class WeightsAndBiases:
    """One Weights & Biases run, continued under the same id when training is resumed."""

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
    trackers: list[Tracker] = [TensorBoard(folder / TENSORBOARD, after), Prometheus(folder.name, settings)]
    if settings.wandb:
        trackers.append(WeightsAndBiases(folder, settings))
    return trackers


def figures_of(line: Update) -> dict[str, float]:
    """Returns the finite numbers of an update, and each policy's place in the chain (0: pioneer) as `place/llm_1`."""
    figures = {name: value for name, value in flatten(line) if name != "update"}
    return figures | {f"{PLACE}{policy}": float(k) for k, policy in enumerate(line.get("roles", {}).values())}


def flatten(record: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields the finite numbers of a nested record as `policy/llm_1/kl`, value."""
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}/")
        elif not isinstance(value, str | list | tuple | None):
            number = plain(value)
            if isinstance(number, int | float):
                yield f"{prefix}{key}", float(number)
