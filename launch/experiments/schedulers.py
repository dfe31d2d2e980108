"""Schedulers for Tune that decide only right after an evaluation, and let a search be stopped and resumed."""

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
"""ASHA lets the best third go on at each rung."""
QUANTILE = 0.25
"""PBT: the share of members that become clones, and of those that are cloned."""
RESAMPLE_PROBABILITY = 0.25
"""PBT: how often a clone's value is drawn anew; else it moves by a step."""
PERTURBATION_FACTORS = (0.8, 1.2)
"""PBT: a step in a range."""


StopRequested = Callable[[], bool]
"""Tells whether a search is asked to stop."""
TrialReports = Sequence[Mapping[str, Any]]
"""What trials reported, in the order of time."""


class StoppableScheduler:
    """For a scheduler: pauses trials after their update, which saves them, once the search is asked to stop."""

    def __init__(self, trials: Trials, stopping: StopRequested, **arguments: Any) -> None:
        """Takes the trials, what tells whether to stop, and the scheduler's own arguments."""
        super().__init__(**arguments)
        self.trials = trials
        self.stopping = stopping

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """Takes a trial, new or of a search that resumes."""
        self.trials.add(trial)
        super().on_trial_add(tune_controller, trial)  # type: ignore[misc]

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        """Decides how a trial continues."""
        decision: str = super().on_trial_result(tune_controller, trial, result)  # type: ignore[misc]
        return FIFOScheduler.PAUSE if decision == FIFOScheduler.CONTINUE and self.stopping() else decision

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """Returns the trial to start next."""
        return None if self.stopping() else super().choose_trial_to_run(tune_controller)  # type: ignore[misc]


class FifoScheduler(StoppableScheduler, FIFOScheduler):
    """Lets all trials run to their end."""


class AshaScheduler(StoppableScheduler, ASHAScheduler):
    """Stops trials that are worse than others were after as many updates: rungs at eval_every times 1, 3, 9, ..."""

    def __init__(self, trials: Trials, stopping: StopRequested, settings: Settings, reports: TrialReports = ()) -> None:
        """Sets the rungs.

        Args:
            trials: of the search.
            stopping: tells whether the search is asked to stop.
            settings: of all trials.
            reports: of a search that resumes, in the order of time. Tune forgets its rungs when it is killed.
        """
        super().__init__(
            trials,
            stopping,
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

    After every evaluation the worst quarter of the members continues as clones of the best one, with other values.
    Members wait for each other there, so that all are compared after as many updates. Nobody waits for one that failed,
    or has ended. Tune's own `PopulationBasedTraining` waits for those, and forgets its clones when it is killed.
    """

    def __init__(self, trials: Trials, stopping: StopRequested, settings: Settings, axes: Sequence[Axis]) -> None:
        """Takes the members, what tells whether to stop, the settings of all members, and what is searched."""
        super().__init__(trials, stopping)
        self._axes = axes
        self._every = settings.eval_every
        self._compared = 0
        """The update after which members were compared last."""
        self._random = np.random.default_rng(settings.seed)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        """Lets a member wait where it was evaluated."""
        decision = super().on_trial_result(tune_controller, trial, result)
        return decision if result[TIME_KEY] % self._every else self.PAUSE

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """Returns the member that is furthest behind; once all are as far as each other, compares them first."""
        if self.stopping():
            return None
        members = [trial for trial in tune_controller.get_trials() if not trial.is_finished()]
        for member in members:
            if member.status == Trial.PENDING:
                return member
        waiting = [member for member in members if member.status == Trial.PAUSED]
        done = {member: member.last_result.get(TIME_KEY, 0) for member in members}
        furthest = max(done.values(), default=0)
        if len(waiting) == len(members) and furthest > self._compared and min(done.values()) == furthest:
            self._compare(waiting)
            self._compared = furthest
        due = [member for member in waiting if done[member] <= self._compared or done[member] < furthest]
        return min(due, key=lambda member: done[member], default=None)

    def _compare(self, members: Sequence[Trial]) -> None:
        """Makes the worst members clones of the best; those without a figure are neither."""
        ranked = sorted(
            (member for member in members if math.isfinite(member.last_result[OBJECTIVE])),
            key=lambda member: member.last_result[OBJECTIVE],
        )
        count = min(math.ceil(len(ranked) * QUANTILE), len(ranked) // 2)
        for worse in ranked[:count]:
            donor = ranked[-1 - int(self._random.integers(count))]
            self.trials.clone(donor, worse, self._explore(self.trials.values[donor.trial_id]))

    def _explore(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """Returns a donor's values, those that are searched moved by a step or drawn anew."""
        return {**values, **{axis.key: self._move(axis, values[axis.key]) for axis in self._axes}}

    def _move(self, axis: Axis, value: Any) -> Any:
        if self._random.random() < RESAMPLE_PROBABILITY:
            return axis.domain(grid=False).sample(random_state=self._random)
        if axis.scale is None:
            index = axis.values.index(value) + int(self._random.choice((-1, 1)))
            return axis.values[min(max(index, 0), len(axis.values) - 1)]
        low, high = axis.values
        moved = value * float(self._random.choice(PERTURBATION_FACTORS))
        return min(max(round(moved) if isinstance(value, int) else moved, low), high)
