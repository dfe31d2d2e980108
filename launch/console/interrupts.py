"""Ctrl-C, SIGTERM and SIGHUP: the first lets the update finish and be saved, another Ctrl-C or SIGTERM aborts at once.

SIGHUP comes when the terminal or the ssh connection closes. Where it is ignored, as under `nohup`, it stays ignored.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Returns those of `SIGNALS` that this process heeds: not SIGHUP if that is ignored."""
    return tuple(
        number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    )


@contextlib.contextmanager
def hangup_blocked() -> Iterator[None]:
    """Blocks SIGHUP for the processes that are started meanwhile, which inherit that.

    A terminal that closes sends it to the whole process group: without this, it would end Ray's processes while the
    driver finishes its update. As Ray does with SIGINT. One that comes meanwhile is delivered when this is left.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Interrupts:
    """Notes a request to stop, while it is entered as a context.

    Until `training` is set there is nothing to finish, so the first request already aborts. It stays set: what ends a
    run must not be cut off either. Afterwards the signals are whose they were before. In another thread than the main
    one, which alone gets them, they stay whose they are.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        """Takes what tells the user, once, that the request was heard."""
        self.training = False
        self.requested: signal.Signals | None = None
        self._tell = tell
        self._leaving = contextlib.ExitStack()
        self._signals: tuple[signal.Signals, ...] = ()

    def __enter__(self) -> Self:
        self._signals = stop_signals() if _gets_signals() else ()
        for number in self._signals:
            self._leaving.callback(signal.signal, number, signal.getsignal(number) or signal.SIG_DFL)
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.close()

    @property
    def exit_code(self) -> int:
        """The shell's convention for a process that a signal ended."""
        return 128 + (self.requested or signal.SIGINT)

    def install(self) -> None:
        """Takes the signals; needed again after libraries that take them too, as `ray.init` does."""
        if _gets_signals():
            for number in self._signals:
                signal.signal(number, self._receive)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP and self.requested is not None:
            return  # the shell and the kernel both send it when one terminal closes
        if self.requested is not None or not self.training:
            self.requested = signal.Signals(number)
            raise KeyboardInterrupt(self.exit_code)
        self.requested = signal.Signals(number)
        threading.Thread(target=self._tell).start()  # this thread may be in mid-print, which must not be entered twice


def _gets_signals() -> bool:
    return threading.current_thread() is threading.main_thread()
