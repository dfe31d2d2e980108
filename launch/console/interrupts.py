"""Handling of SIGINT (Ctrl-C), SIGTERM and SIGHUP.

The first signal finishes and saves the current update; another SIGINT or SIGTERM aborts at once. SIGHUP is sent when
the terminal or ssh connection closes. If it is ignored, as under `nohup`, it stays ignored.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Returns `SIGNALS`, without SIGHUP if this process ignores it."""
    return tuple(
        number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    )


@contextlib.contextmanager
def hangup_blocked() -> Iterator[None]:
    """Context manager: child processes started in it inherit a blocked SIGHUP.

    A closing terminal sends SIGHUP to the whole process group, which would end Ray's processes while the driver
    finishes its update. Ray blocks SIGINT for the same reason. A SIGHUP is delivered when the context exits.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


class Interrupts:
    """Context manager: records a signal as a request to stop.

    Before `training` is set, there is no update to finish, so the first signal aborts. It stays set after training, so
    that saving the results is not interrupted either. The previous handlers are restored on exit. Outside the main
    thread, which alone receives signals, this does nothing.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        """Installs no handlers yet; `notify`, called once, in a thread, tells the user about the first signal."""
        self.training = False
        self.requested: signal.Signals | None = None
        self._notify = notify
        self._exit_stack = contextlib.ExitStack()
        self._signals: tuple[signal.Signals, ...] = ()

    def __enter__(self) -> Self:
        self._signals = stop_signals() if _in_main_thread() else ()
        for number in self._signals:
            self._exit_stack.callback(signal.signal, number, signal.getsignal(number) or signal.SIG_DFL)
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self._exit_stack.close()

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as in a shell."""
        return 128 + (self.requested or signal.SIGINT)

    def install(self) -> None:
        """Installs the signal handlers. Call it again after libraries that replace them, such as `ray.init`."""
        if _in_main_thread():
            for number in self._signals:
                signal.signal(number, self._receive)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP and self.requested is not None:
            return  # the shell and the kernel both send SIGHUP when a terminal closes
        if self.requested is not None or not self.training:
            self.requested = signal.Signals(number)
            raise KeyboardInterrupt(self.exit_code)
        self.requested = signal.Signals(number)
        threading.Thread(target=self._notify).start()  # this thread may be inside print, which is not reentrant


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
