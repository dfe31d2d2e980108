"""Ctrl-C and SIGTERM are a run's while it trains, and its caller's before and after."""

import signal
import subprocess
import threading
from collections.abc import Iterator

import pytest

from launch.console.interrupts import SIGNALS, Interrupts, hangup_blocked, stop_signals


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """What the handlers of whoever calls hear."""
    heard: list[int] = []
    usual = {number: signal.signal(number, lambda number, _: heard.append(number)) for number in SIGNALS}
    yield heard
    for number, handler in usual.items():
        signal.signal(number, handler)


def test_the_signals_are_whose_they_were_when_it_is_left(heard: list[int]) -> None:
    with Interrupts(lambda: None) as interrupts:
        interrupts.training = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as libraries take it
        interrupts.install()
        signal.raise_signal(signal.SIGTERM)
    assert (interrupts.requested, heard) == (signal.SIGTERM, [])
    for number in SIGNALS:
        signal.raise_signal(number)
    assert heard == list(SIGNALS)


def test_off_the_main_thread_the_signals_stay_the_caller_s(heard: list[int]) -> None:
    entered, go_on = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with Interrupts(lambda: None) as interrupts:
                interrupts.install()
                entered.set()
                go_on.wait(10)
        except BaseException as error:
            failed.append(error)
            entered.set()

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait(10)
    signal.raise_signal(signal.SIGINT)
    go_on.set()
    thread.join(10)
    signal.raise_signal(signal.SIGTERM)
    assert (failed, heard) == ([], [signal.SIGINT, signal.SIGTERM])


def test_a_hangup_stops_a_run_once_as_the_shell_and_the_kernel_both_send_it(heard: list[int]) -> None:
    with Interrupts(lambda: None) as interrupts:
        interrupts.training = True
        for _ in range(3):
            signal.raise_signal(signal.SIGHUP)
        assert (interrupts.requested, interrupts.exit_code) == (signal.SIGHUP, 129)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert heard == []


def test_a_hangup_that_is_ignored_stays_ignored(heard: list[int]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    assert signal.SIGHUP not in stop_signals()
    with Interrupts(lambda: None) as interrupts:
        interrupts.training = True
        interrupts.install()
        signal.raise_signal(signal.SIGHUP)
        assert interrupts.requested is None
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_processes_that_are_started_meanwhile_outlive_a_hangup() -> None:
    with hangup_blocked():
        child = subprocess.Popen(["sleep", "60"])
    try:
        child.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.5)
    finally:
        child.kill()
        child.wait()
