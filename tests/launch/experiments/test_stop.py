"""When a search that is asked to stop ends, with Tune's trials but without its processes."""

import signal
import time
from collections.abc import Iterator
from types import FrameType

import pytest
from ray.tune.experiment import Trial

from launch.console.interrupts import Interrupts
from launch.experiments.callbacks import StopCallback


@pytest.fixture
def ends() -> Iterator[list[int]]:
    """The signals by which Tune was told to end."""
    received: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)

    before = signal.signal(signal.SIGUSR1, note)
    yield received
    signal.signal(signal.SIGUSR1, before)


def trial(name: str, status: str) -> Trial:
    made = Trial("Cory", stub=True, trial_id=name)
    made.status = status
    return made


def test_it_ends_when_every_trial_that_did_an_update_is_paused(ends: list[int]) -> None:
    interrupts = Interrupts(lambda: None)
    stop = StopCallback(interrupts)
    first, second, starting = (trial(name, Trial.RUNNING) for name in ("first", "second", "starting"))
    trials = [first, second, starting, trial("paused", Trial.PAUSED)]
    for one in trials:
        stop.on_trial_result(1, trials, one, {})
    stop.on_trial_start(2, trials, starting)  # in a new process, which has not done anything
    stop.on_step_end(2, trials)
    assert not ends and not stop.requested()

    interrupts.requested = signal.SIGINT
    assert stop.requested()
    stop.on_step_end(3, trials)
    first.status = Trial.PAUSED
    stop.on_step_end(4, trials)
    assert not ends
    second.status = Trial.ERROR
    stop.on_step_end(5, trials)
    assert ends == [signal.SIGUSR1]
    for one in trials:
        one.status = Trial.TERMINATED  # as Tune leaves them
    assert stop.statuses == {"first": "PAUSED", "second": "ERROR", "starting": "RUNNING", "paused": "PAUSED"}


def test_a_search_in_which_nothing_runs_ends_at_once(ends: list[int]) -> None:
    interrupts = Interrupts(lambda: None)
    stop = StopCallback(interrupts)
    interrupts.requested = signal.SIGTERM
    stop.on_step_end(1, [trial("waiting", Trial.PENDING)])
    assert ends == [signal.SIGUSR1]


def test_a_budget_of_updates_is_of_all_trials_together_and_ends_a_search_as_ctrl_c_does(ends: list[int]) -> None:
    stop = StopCallback(Interrupts(lambda: None), max_updates=3)
    trials = [trial(name, Trial.RUNNING) for name in ("first", "second")]
    for one in (*trials, trials[0]):
        stop.on_step_end(1, trials)
        assert not ends and not stop.requested()
        stop.done[one.trial_id] += 1  # as Tune asks whether the trial has ended
        stop.on_trial_result(1, trials, one, {})
    stop.on_step_end(2, trials)
    assert not ends and stop.requested()
    for one in trials:
        one.status = Trial.PAUSED
    stop.on_step_end(3, trials)
    assert ends == [signal.SIGUSR1]


def test_a_budget_of_time_begins_with_the_first_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stop = StopCallback(Interrupts(lambda: None), max_minutes=2)
    now[0] += 1000
    assert not stop.is_spent
    for _ in range(2):
        stop.on_trial_start(1, [], trial("first", Trial.RUNNING))
        now[0] += 61
        assert stop.is_spent == (now[0] > 1200)
