"""Signal handling during training, and restoring the caller's handlers."""

import signal
import subprocess
import threading
from collections.abc import Iterator

import pytest

from launch.console.interrupts import SIGNALS, Interrupts, hangup_blocked, stop_signals


@pytest.fixture
def received() -> Iterator[list[int]]:
    """Signals received by the caller's handlers."""
    received: list[int] = []
    handlers = {number: signal.signal(number, lambda number, _: received.append(number)) for number in SIGNALS}
    yield received
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_signal_handlers_are_restored_on_exit(received: list[int]) -> None:
    with Interrupts(lambda: None) as interrupts:
        interrupts.training = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as some libraries do
        interrupts.install()
        signal.raise_signal(signal.SIGTERM)
    assert (interrupts.requested, received) == (signal.SIGTERM, [])
    for number in SIGNALS:
        signal.raise_signal(number)
    assert received == list(SIGNALS)


def test_outside_the_main_thread_signal_handlers_are_not_changed(received: list[int]) -> None:
    started, finish = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with Interrupts(lambda: None) as interrupts:
                interrupts.install()
                started.set()
                finish.wait(10)
        except BaseException as error:
            errors.append(error)
            started.set()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait(10)
    signal.raise_signal(signal.SIGINT)
    finish.set()
    thread.join(10)
    signal.raise_signal(signal.SIGTERM)
    assert (errors, received) == ([], [signal.SIGINT, signal.SIGTERM])


def test_repeated_hangups_count_once(received: list[int]) -> None:
    with Interrupts(lambda: None) as interrupts:
        interrupts.training = True
        for _ in range(3):
            signal.raise_signal(signal.SIGHUP)
        assert (interrupts.requested, interrupts.exit_code) == (signal.SIGHUP, 129)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert received == []


def test_an_ignored_hangup_stays_ignored(received: list[int]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    assert signal.SIGHUP not in stop_signals()
    with Interrupts(lambda: None) as interrupts:
        interrupts.training = True
        interrupts.install()
        signal.raise_signal(signal.SIGHUP)
        assert interrupts.requested is None
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_child_processes_survive_a_hangup() -> None:
    with hangup_blocked():
        child = subprocess.Popen(["sleep", "60"])
    try:
        child.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.5)
    finally:
        child.kill()
        child.wait()
