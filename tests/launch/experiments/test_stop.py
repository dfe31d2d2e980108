"""Stopping a search, with Tune's trials but without its processes."""

import signal
import time
from collections.abc import Iterator
from types import FrameType

import pytest
from ray.tune.experiment import Trial

from launch.console.interrupts import Interrupts
from launch.experiments.callbacks import StopCallback


@pytest.fixture
def stop_signals() -> Iterator[list[int]]:
    """The signals sent to Tune."""
    received: list[int] = []

    def record(number: int, _: FrameType | None) -> None:
        received.append(number)

    previous_handler = signal.signal(signal.SIGUSR1, record)
    yield received
    signal.signal(signal.SIGUSR1, previous_handler)


def make_trial(name: str, status: str) -> Trial:
    trial = Trial("Cory", stub=True, trial_id=name)
    trial.status = status
    return trial


def test_a_search_stops_when_every_trial_with_an_update_to_save_is_paused(stop_signals: list[int]) -> None:
    interrupts = Interrupts(lambda: None)
    stop = StopCallback(interrupts)
    first, second, starting = (make_trial(name, Trial.RUNNING) for name in ("first", "second", "starting"))
    trials = [first, second, starting, make_trial("paused", Trial.PAUSED)]
    for trial in trials:
        stop.on_trial_result(1, trials, trial, {})
    stop.on_trial_start(2, trials, starting)  # in a new process without an update
    stop.on_step_end(2, trials)
    assert not stop_signals and not stop.requested()

    interrupts.requested = signal.SIGINT
    assert stop.requested()
    stop.on_step_end(3, trials)
    first.status = Trial.PAUSED
    stop.on_step_end(4, trials)
    assert not stop_signals
    second.status = Trial.ERROR
    stop.on_step_end(5, trials)
    assert stop_signals == [signal.SIGUSR1]
    for trial in trials:
        trial.status = Trial.TERMINATED  # as Tune leaves them
    assert stop.statuses == {"first": "PAUSED", "second": "ERROR", "starting": "RUNNING", "paused": "PAUSED"}


def test_a_search_without_running_trials_stops_at_once(stop_signals: list[int]) -> None:
    interrupts = Interrupts(lambda: None)
    stop = StopCallback(interrupts)
    interrupts.requested = signal.SIGTERM
    stop.on_step_end(1, [make_trial("waiting", Trial.PENDING)])
    assert stop_signals == [signal.SIGUSR1]


def test_a_budget_of_updates_covers_all_trials_and_stops_a_search_like_ctrl_c(stop_signals: list[int]) -> None:
    stop = StopCallback(Interrupts(lambda: None), max_updates=3)
    trials = [make_trial(name, Trial.RUNNING) for name in ("first", "second")]
    for trial in (*trials, trials[0]):
        stop.on_step_end(1, trials)
        assert not stop_signals and not stop.requested()
        stop.done[trial.trial_id] += 1  # as when Tune checks whether the trial has ended
        stop.on_trial_result(1, trials, trial, {})
    stop.on_step_end(2, trials)
    assert not stop_signals and stop.requested()
    for trial in trials:
        trial.status = Trial.PAUSED
    stop.on_step_end(3, trials)
    assert stop_signals == [signal.SIGUSR1]


def test_a_time_budget_starts_with_the_first_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stop = StopCallback(Interrupts(lambda: None), max_minutes=2)
    now[0] += 1000
    assert not stop.is_spent
    for _ in range(2):
        stop.on_trial_start(1, [], make_trial("first", Trial.RUNNING))
        now[0] += 61
        assert stop.is_spent == (now[0] > 1200)
