"""The processes of a run and the Ray resources that each requires."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from policies.settings.fields import Fields

BUILTIN_RESOURCES = ("CPU", "GPU", "memory", "object_store_memory")
"""Resources that other settings, or Ray itself, assign."""


@dataclass(frozen=True)
class Process:
    """A kind of process, and the resources that each instance requires on one node."""

    name: str
    count: int
    cpus: float
    gpus: float
    custom: dict[str, float]


def named_resources(setting: str, text: str | None) -> dict[str, float]:
    """Parses custom resources such as `sampling=1,fast=0.5`.

    Args:
        setting: name of the setting, for the message.
        text: its value; None: no resources.

    Returns:
        Resource name → amount.

    Raises:
        ValueError: the text is invalid.
    """
    resources: dict[str, float] = {}
    for part in [] if text is None else text.split(","):
        name, _, amount = (word.strip() for word in part.partition("="))
        if name in resources:
            raise ValueError(f"{setting}={text} has the resource {name!r} twice. Write it once.")
        try:
            resources[name] = math.nan if "_" in amount else float(amount)
        except ValueError:
            resources[name] = math.nan
        if not name or name in BUILTIN_RESOURCES or not (0 < resources[name] < math.inf):
            raise ValueError(
                f"{setting}={text}: `{part}` is not a custom resource with an amount. Write name=number, separated by "
                f"commas, such as sampling=1,fast=0.5; {', '.join(BUILTIN_RESOURCES)} have their own settings."
            )
    return resources


def processes(settings: Fields, trial: bool = False) -> list[Process]:
    """Returns the processes of a run: driver, runners and learners.

    The driver also learns if there are no learners, and generates if there are no runners.

    Args:
        settings: the run's.
        trial: whether the driver is a trial of Tune, which requires a Ray CPU.
    """
    s = settings
    driver_gpus = (s.gpus_per_learner if s.num_learners == 0 else 0) + (s.gpus_per_runner if s.num_runners == 0 else 0)
    kinds = [
        Process("driver", 1, 1 if trial else 0, driver_gpus, {}),
        Process(
            "runner",
            s.num_runners,
            s.runner_threads,
            s.gpus_per_runner,
            named_resources("runner_resources", s.runner_resources),
        ),
        Process(
            "learner",
            s.num_learners,
            0 if s.gpus_per_learner else 1,  # as in RLlib
            s.gpus_per_learner,
            named_resources("learner_resources", s.learner_resources),
        ),
    ]
    return [kind for kind in kinds if kind.count]


def cpus(kinds: Sequence[Process]) -> int:
    """Returns the number of Ray CPUs that all processes require."""
    return int(sum(kind.count * kind.cpus for kind in kinds))
