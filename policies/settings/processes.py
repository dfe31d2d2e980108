"""What each process of a run asks Ray for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from policies.settings.fields import Fields

OWN = ("CPU", "GPU", "memory", "object_store_memory")
"""Resources that other settings, or Ray, give out."""


@dataclass(frozen=True)
class Process:
    """A kind of process, and what Ray must find on one node for each."""

    name: str
    count: int
    cpus: float
    gpus: float
    custom: dict[str, float]


def named_resources(setting: str, text: str | None) -> dict[str, float]:
    """Reads custom resources: `sampling=1,fast=0.5`.

    Raises:
        ValueError: the text of `setting` is not like that.
    """
    found: dict[str, float] = {}
    for part in [] if text is None else text.split(","):
        name, _, amount = (word.strip() for word in part.partition("="))
        try:
            found[name] = float(amount)
        except ValueError:
            found[name] = math.nan
        if not name or name in OWN or not (0 < found[name] < math.inf):
            raise ValueError(
                f"{setting}={text}: `{part}` is not a custom resource and how much of it. Write name=number, with "
                f"commas between them, such as sampling=1,fast=0.5; {', '.join(OWN)} have settings of their own."
            )
    return found


def processes(settings: Fields, trial: bool = False) -> list[Process]:
    """Returns what is started: the driver, which learns if there are no learners and generates if there are no runners,
    and its runners and learners.

    Args:
        settings: of the run.
        trial: the driver is a trial of Tune, which asks Ray for its CPU; else it runs where it was started.
    """
    s = settings
    own = (s.gpus_per_learner if s.num_learners == 0 else 0) + (s.gpus_per_runner if s.num_runners == 0 else 0)
    kinds = [
        Process("driver", 1, 1 if trial else 0, own, {}),
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
            0 if s.gpus_per_learner else 1,  # as RLlib has it
            s.gpus_per_learner,
            named_resources("learner_resources", s.learner_resources),
        ),
    ]
    return [kind for kind in kinds if kind.count]


def cpus(kinds: Sequence[Process]) -> int:
    """Returns the CPUs that processes ask Ray for in all."""
    return int(sum(kind.count * kind.cpus for kind in kinds))
