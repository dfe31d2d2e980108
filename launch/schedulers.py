"""Tune's schedulers, set so that they decide only where a trial was just evaluated."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from launch.command import CommandError
from launch.search_space import Axis
from policies.settings import Settings

TIME = "updates"
REDUCTION = 3
"""ASHA lets the best third go on at each rung."""


def asha(settings: Settings, reports: Sequence[Mapping[str, Any]] = ()) -> Any:
    """Stops trials that are worse than others were after as many updates: rungs at eval_every times 1, 3, 9, ...

    Args:
        settings: of all trials.
        reports: of a search that goes on, in the order of time. Tune forgets its rungs when it is killed.
    """
    from ray.tune.schedulers import ASHAScheduler

    scheduler = ASHAScheduler(
        time_attr=TIME, max_t=settings.updates, grace_period=settings.eval_every, reduction_factor=REDUCTION
    )
    for report in reports:
        trial = SimpleNamespace(trial_id=report["trial_id"])
        scheduler._brackets[0].on_result(trial, report[TIME], report["combined_reward"])
    return scheduler


def population(settings: Settings, axes: Sequence[Axis]) -> Any:
    """Lets the worst quarter continue as clones of the best one, with other values, after every evaluation."""
    from ray.tune.schedulers import PopulationBasedTraining

    return PopulationBasedTraining(
        time_attr=TIME,
        perturbation_interval=settings.eval_every,
        hyperparam_mutations={"cory_settings": {axis.key: axis.mutations() for axis in axes}},
        custom_explore_fn=Within(axes),
    )


class Within:
    """Holds mutated values inside their ranges: PBT multiplies them by 0.8 or 1.2."""

    def __init__(self, axes: Sequence[Axis]) -> None:
        self.ranges = {axis.key: axis.values for axis in axes if axis.scale is not None}

    def __call__(self, config: dict[str, Any]) -> dict[str, Any]:
        """Returns the configuration, its values cut to their ranges."""
        settings = config["cory_settings"]
        for key, (low, high) in self.ranges.items():
            settings[key] = min(max(settings[key], low), high)
        return config


def check_evaluations(settings: Settings, scheduler: str) -> None:
    """Refuses a scheduler that would have nothing to compare.

    Raises:
        CommandError: no trial is evaluated before its end.
    """
    if settings.eval_every >= settings.updates:
        raise CommandError(
            f"--scheduler {scheduler} compares trials after evaluations, but the first of these is after "
            f"{settings.eval_every} of {settings.updates} updates. Lower eval_every, or leave the scheduler out."
        )
