"""What a machine's processors did while a command ran in it: its own work, and that of all others."""

import time
from typing import NamedTuple

import psutil


class Used(NamedTuple):
    """Processor time since a watch began."""

    own: float
    """CPU seconds of the command and all that it started."""
    others: float
    """Share of all processors that anything else had, other virtual machines on the same hardware too."""


class LoadWatch:
    """Watches a process and its descendants. It must be looked at every few seconds: those that end take with them what
    they used since the last look.
    """

    def __init__(self, pid: int) -> None:
        """Begins now."""
        self._process = psutil.Process(pid)
        self._seconds: dict[tuple[int, float], float] = {}
        self._busy = _busy()
        self._started = time.monotonic()

    def look(self) -> None:
        """Notes what each process has used so far."""
        try:
            family = [self._process, *self._process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in family:
            try:
                times = process.cpu_times()
                self._seconds[process.pid, process.create_time()] = times.user + times.system
            except psutil.Error:  # it has just ended
                continue

    def used(self) -> Used:
        """Returns what was used until now."""
        own = sum(self._seconds.values())
        available = (psutil.cpu_count() or 1) * (time.monotonic() - self._started)
        return Used(own, max(_busy() - self._busy - own, 0.0) / available)


def _busy() -> float:
    """CPU seconds, over all processors, in which they were not idle, since the machine started."""
    times = psutil.cpu_times()._asdict()
    within_user = ("guest", "guest_nice")  # counted in user and nice too
    return sum(value for name, value in times.items() if name not in ("idle", "iowait", *within_user))
