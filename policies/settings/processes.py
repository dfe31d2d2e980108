"""The processes of a run and the Ray resources that each requires."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.settings.fields import Fields

_DRIVER = "driver"  # the process that `cory` itself runs in


@dataclass(frozen=True)
class Process:
    """A kind of process, and the resources that each instance requires on one node."""

    name: str
    count: int
    cpus: float
    gpus: float


def processes(settings: Fields, trial: bool = False) -> list[Process]:
    """Returns the processes of a run: driver, runners and learners.

    The driver also learns if there are no learners, and generates if there are no runners.

    Args:
        trial: whether the driver is a trial of Tune, which requires a Ray CPU.
    """
    s = settings
    driver_gpus = (s.gpus_per_learner if s.num_learners == 0 else 0) + (s.gpus_per_runner if s.num_runners == 0 else 0)
    kinds = [
        Process(_DRIVER, 1, 1 if trial else 0, driver_gpus),
        Process("runner", s.num_runners, s.runner_threads, s.gpus_per_runner),
        Process("learner", s.num_learners, 0 if s.gpus_per_learner else 1, s.gpus_per_learner),  # CPUs as in RLlib
    ]
    return [kind for kind in kinds if kind.count]


def needs_ray(kinds: Sequence[Process]) -> bool:
    """Returns whether a run needs Ray: to start processes besides the driver, or to assign GPUs."""
    return any(kind.name != _DRIVER or kind.gpus for kind in kinds)


def cpus(kinds: Sequence[Process]) -> int:
    """Returns the number of Ray CPUs that all processes require."""
    return int(sum(kind.count * kind.cpus for kind in kinds))
