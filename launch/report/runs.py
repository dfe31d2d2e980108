"""What a report is about: runs, and arms, which are runs that differ in nothing but their seed."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from launch.command import CommandError
from launch.configuration import Value
from launch.records import Figures, SampleLine, Update
from launch.results import Row
from launch.run_directory import CONFIG, RunDirectory
from launch.search_space import show_value
from launch.train import RESUMABLE
from policies.settings import Settings

MEAN = "mean"
"""The key under which an evaluation holds the mean of its policies."""
UNFINISHED = "unfinished"
NO_DIFFERENCE = ("seed", *RESUMABLE)
"""Settings in which the runs of one arm may differ."""


@dataclass(frozen=True)
class Evaluation:
    """What `cory evaluate` found."""

    name: str
    split: str
    rows: dict[str, Row]


@dataclass(frozen=True)
class Run:
    """One training: a run's folder."""

    name: str
    settings: Settings
    updates: list[Update]
    samples: list[SampleLine]
    environment: dict[str, str]
    """What is known of how and where it ran."""
    evaluations: list[Evaluation] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Updates that are done."""
        return self.updates[-1]["update"] if self.updates else 0

    @property
    def state(self) -> str:
        """How it stands."""
        if self.settings.stop_on_collapse and any(line.get("collapsed") for line in self.updates[-1:]):
            return "ended by a collapse"
        return "done" if self.done >= self.settings.updates else UNFINISHED

    @property
    def held_out(self) -> dict[int, dict[str, Figures]]:
        """The held-out evaluations, by update."""
        return {line["update"]: line["evaluation"] for line in self.updates if "evaluation" in line}

    @property
    def final(self) -> Figures:
        """The last held-out evaluation, mean of the policies; empty before the first."""
        return next((found[MEAN] for found in reversed(self.held_out.values())), {})


@dataclass(frozen=True)
class Arm:
    """Runs whose settings are the same but for the seed."""

    label: str
    runs: list[Run]

    @property
    def settings(self) -> Settings:
        """Of the first run."""
        return self.runs[0].settings

    @property
    def counted(self) -> list[Run]:
        """The runs whose last figures are compared: those that ended, or all as long as none has."""
        return [run for run in self.runs if run.state != UNFINISHED] or self.runs


def read_run(folder: Path, name: str) -> Run:
    """Reads a run's folder.

    Args:
        folder: of a run, finished or not.
        name: what the report calls it.

    Raises:
        CommandError: there is no run, or a file of it is damaged.
    """
    run = RunDirectory.open(folder)
    lines = (folder / CONFIG).read_text(encoding="utf-8").splitlines()
    commands = [line.removeprefix("# ") for line in lines if line.startswith("# ")]
    environment = {f"command {number}" if number > 1 else "command": text for number, text in enumerate(commands, 1)}
    return Run(
        name=name,
        settings=run.settings(),
        updates=run.updates(),
        samples=cast(list[SampleLine], run.samples.read()),
        environment=environment,
        evaluations=[_read_evaluation(file) for file in sorted(folder.glob("evaluation/*/evaluation.json"))],
    )


def _read_evaluation(file: Path) -> Evaluation:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return Evaluation(file.parent.name, found["split"], found["rows"])
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{file} is not what `cory evaluate` wrote there. Evaluate again, or remove it.") from error


def names(folders: Sequence[Path]) -> list[str]:
    """Returns a name per folder, as short as tells them apart: the last parts of its path."""
    parts = [folder.resolve().parts for folder in folders]
    for size in range(1, max(map(len, parts)) + 1):
        found = ["/".join(each[-size:]) for each in parts]
        if len(set(found)) == len(set(parts)):
            break
    return found


def differing(runs: Sequence[Run]) -> list[str]:
    """Returns the settings in which runs differ."""
    dumps = [run.settings.model_dump() for run in runs]
    return [key for key in Settings.model_fields if len({repr(each[key]) for each in dumps}) > 1]


def arms_of(runs: Sequence[Run]) -> list[Arm]:
    """Groups runs that differ in nothing but their seed, and names each group by what sets it apart."""
    keys = [key for key in differing(runs) if key not in NO_DIFFERENCE]
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(repr(getattr(run.settings, key)) for key in keys), []).append(run)
    usual = {key: Counter(group[place] for group in groups).most_common(1)[0][0] for place, key in enumerate(keys)}
    others = [key for key in keys if key != "num_agents"]
    arms = []
    for group in groups.values():
        settings = group[0].settings
        apart = {key: getattr(settings, key) for key in others}
        if len(others) > 1:
            apart = {key: value for key, value in apart.items() if repr(value) != usual[key]}
        label = [method(settings)] if "num_agents" in keys or not apart else []
        label += [f"{key}={_shown(value)}" for key, value in apart.items()]
        arms.append(Arm(", ".join(label), sorted(group, key=lambda run: run.settings.seed)))
    return arms


def method(settings: Settings) -> str:
    """Returns what a run's algorithm is called."""
    if settings.num_agents == 1:
        return "PPO"
    return "CORY" if settings.num_agents == 2 else f"CORY of {settings.num_agents}"


def _shown(value: Value) -> str:
    text = show_value(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
