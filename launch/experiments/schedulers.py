"""Tune schedulers that decide only right after an evaluation, and support stopping and resuming a search."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler

from launch.experiments.space import OBJECTIVE, TIME_KEY, Axis
from launch.experiments.trials import Trials
from policies.settings.settings import Settings
from policies.settings.yaml12 import Value

REDUCTION_FACTOR = 3
"""ASHA: the best third continues at each rung."""
QUANTILE = 0.25
"""PBT: share of members that become clones, and of members that are cloned."""
RESAMPLE_PROBABILITY = 0.25
"""PBT: probability of resampling a clone's value instead of perturbing it."""
PERTURBATION_FACTORS = (0.8, 1.2)
"""PBT: factors that perturb a value of a range."""


StopRequested = Callable[[], bool]
"""Returns whether the search should stop."""
TrialReports = Sequence[Mapping[str, Any]]
"""Reports of trials, in chronological order."""


class StoppableScheduler:
    """Mixin for schedulers: once the search should stop, pauses each trial after its update, which saves the trial."""

    def __init__(self, trials: Trials, stop_requested: StopRequested, **arguments: Any) -> None:
        """Creates the scheduler.

        Args:
            trials: of the search.
            stop_requested: returns whether the search should stop.
            arguments: of the scheduler that this class is mixed into.
        """
        super().__init__(**arguments)
        self.trials = trials
        self.stop_requested = stop_requested

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """Registers a trial, new or restored."""
        self.trials.add(trial)
        super().on_trial_add(tune_controller, trial)  # type: ignore[misc]

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        """Returns whether a trial continues, pauses or stops."""
        decision: str = super().on_trial_result(tune_controller, trial, result)  # type: ignore[misc]
        return FIFOScheduler.PAUSE if decision == FIFOScheduler.CONTINUE and self.stop_requested() else decision

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """Returns the trial to start next."""
        return None if self.stop_requested() else super().choose_trial_to_run(tune_controller)  # type: ignore[misc]


class FifoScheduler(StoppableScheduler, FIFOScheduler):
    """Runs all trials to their end."""


class AshaScheduler(StoppableScheduler, ASHAScheduler):
    """ASHA (Li et al. 2020): stops trials that are worse than others at the same update.

    The rungs are at `eval_every` times 1, 3, 9, and so on.
    """

    def __init__(
        self, trials: Trials, stop_requested: StopRequested, settings: Settings, reports: TrialReports = ()
    ) -> None:
        """Creates the scheduler and restores its rungs.

        Args:
            trials: of the search.
            stop_requested: returns whether the search should stop.
            settings: of all trials.
            reports: of the search so far, in chronological order. Tune loses its rungs when it is killed.
        """
        super().__init__(
            trials,
            stop_requested,
            time_attr=TIME_KEY,
            metric=OBJECTIVE,
            mode="max",
            max_t=settings.num_updates,
            grace_period=settings.eval_every,
            reduction_factor=REDUCTION_FACTOR,
        )
        for report in reports:
            trial = SimpleNamespace(trial_id=report["trial_id"])
            value = math.nan if report[OBJECTIVE] is None else report[OBJECTIVE]
            ASHAScheduler.on_trial_add(self, None, trial)
            ASHAScheduler.on_trial_result(self, None, trial, {TIME_KEY: report[TIME_KEY], OBJECTIVE: value})


class PbtScheduler(StoppableScheduler, FIFOScheduler):
    """Population-based training (Jaderberg et al. 2017, appendix A.1).

    After every evaluation the worst quarter of the members continues as clones of the best quarter, with perturbed
    values. Members wait for each other at the evaluation, so that all are compared at the same update. They do not wait
    for failed or finished members. Tune's own `PopulationBasedTraining` does, and loses its clones when it is killed.
    """

    def __init__(self, trials: Trials, stop_requested: StopRequested, settings: Settings, axes: Sequence[Axis]) -> None:
        """Creates the scheduler.

        Args:
            trials: the members of the population.
            stop_requested: returns whether the search should stop.
            settings: of all members.
            axes: the searched settings.
        """
        super().__init__(trials, stop_requested)
        self._axes = axes
        self._eval_every = settings.eval_every
        self._compared_update = 0
        """The update of the last comparison."""
        self._random = np.random.default_rng(settings.seed)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        """Pauses a member after an evaluation."""
        decision = super().on_trial_result(tune_controller, trial, result)
        return decision if result[TIME_KEY] % self._eval_every else self.PAUSE

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """Returns the member with the fewest updates. When all members are at the same update, compares them first."""
        if self.stop_requested():
            return None
        members = [trial for trial in tune_controller.get_trials() if not trial.is_finished()]
        for member in members:
            if member.status == Trial.PENDING:
                return member
        waiting = [member for member in members if member.status == Trial.PAUSED]
        done = {member: member.last_result.get(TIME_KEY, 0) for member in members}
        furthest = max(done.values(), default=0)
        if len(waiting) == len(members) and furthest > self._compared_update and min(done.values()) == furthest:
            self._exploit(waiting)
            self._compared_update = furthest
        due = [member for member in waiting if done[member] <= self._compared_update or done[member] < furthest]
        return min(due, key=lambda member: done[member], default=None)

    def _exploit(self, members: Sequence[Trial]) -> None:
        """Replaces the worst members by clones of the best; members without a finite objective are left alone."""
        ranked = sorted(
            (member for member in members if math.isfinite(member.last_result[OBJECTIVE])),
            key=lambda member: member.last_result[OBJECTIVE],
        )
        count = min(math.ceil(len(ranked) * QUANTILE), len(ranked) // 2)
        for worse in ranked[:count]:
            donor = ranked[-1 - int(self._random.integers(count))]
            self.trials.clone(donor, worse, self._explore(self.trials.values[donor.trial_id]))

    def _explore(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """Returns a donor's values, with the searched ones perturbed or resampled."""
        return {**values, **{axis.key: self._perturb(axis, values[axis.key]) for axis in self._axes}}

    def _perturb(self, axis: Axis, value: Any) -> Any:
        if self._random.random() < RESAMPLE_PROBABILITY:
            return axis.domain(grid=False).sample(random_state=self._random)
        if axis.scale is None:
            index = axis.values.index(value) + int(self._random.choice((-1, 1)))
            return axis.values[min(max(index, 0), len(axis.values) - 1)]
        low, high = axis.values
        perturbed = value * float(self._random.choice(PERTURBATION_FACTORS))
        return min(max(round(perturbed) if isinstance(value, int) else perturbed, low), high)
