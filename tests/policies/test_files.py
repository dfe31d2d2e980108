"""The user's cache: a folder is complete or absent, even if the process that fills it is killed."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from policies.files import CacheError, cached_folder

FILLER = """
import pathlib, sys, time
from policies.files import cached_folder

def fill(folder):
    (folder / "first").write_text("1")
    print("started", flush=True)
    sys.stdin.readline()
    (folder / "second").write_text("2")

print(cached_folder("model", fill), flush=True)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for this test and the processes it starts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "cory-rllib"


def start() -> subprocess.Popen[str]:
    """Starts a process that fills half of the folder, then waits for a line on its stdin."""
    return subprocess.Popen([sys.executable, "-c", FILLER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


class WaitingThread(threading.Thread):
    """Calls `cached_folder`; its constructor returns after it has had time to start waiting for another process."""

    def __init__(self, fill: Callable[[Path], object]) -> None:
        super().__init__(daemon=True)
        self.returned: Path | None = None
        self._fill = fill
        self.start()
        self.join(0.3)

    def run(self) -> None:
        self.returned = cached_folder("model", self._fill)


def line(process: subprocess.Popen[str]) -> str:
    """Returns the next line that a process prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def fill(folder: Path) -> None:
    """Fills the folder as the processes do."""
    (folder / "first").write_text("1")
    (folder / "second").write_text("2")


def contents(folder: Path) -> dict[str, str]:
    """Reads a folder's files."""
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_folder_is_filled_once_and_readable_by_all(cache: Path) -> None:
    def private(folder: Path) -> None:
        fill(folder)
        (folder / "first").chmod(0o600)

    assert cached_folder("model", private) == cache / "model"
    assert contents(cache / "model") == {"first": "1", "second": "2"}
    assert (cache / "model" / "first").stat().st_mode & 0o777 == 0o644
    inode = (cache / "model").stat().st_ino
    assert cached_folder("model", fill).stat().st_ino == inode


def test_after_a_kill_the_folder_is_absent_and_the_next_process_fills_it(cache: Path) -> None:
    with start() as victim:
        assert line(victim) == "started"
        assert [path.name for path in cache.glob(".unfinished*/*")] == ["first"]
        victim.kill()
    assert victim.returncode == -signal.SIGKILL
    assert not (cache / "model").exists()
    cached_folder("model", fill)
    assert contents(cache / "model") == {"first": "1", "second": "2"}
    assert not list(cache.glob(".unfinished*"))


def test_a_second_process_waits_for_the_first_to_fill_the_folder(cache: Path) -> None:
    def never(folder: Path) -> None:
        raise AssertionError("filled twice")

    with start() as first:
        assert line(first) == "started"
        second = WaitingThread(never)
        assert second.is_alive()
        first.communicate("continue\n")
        second.join(10)
    assert second.returned == cache / "model"
    assert contents(cache / "model") == {"first": "1", "second": "2"}


def test_a_waiting_process_fills_the_folder_if_the_first_one_is_killed(cache: Path) -> None:
    with start() as first:
        assert line(first) == "started"
        second = WaitingThread(fill)
        assert second.is_alive()
        first.kill()
        second.join(10)
    assert second.returned == cache / "model"
    assert contents(cache / "model") == {"first": "1", "second": "2"}


def test_an_error_while_filling_propagates_and_leaves_nothing(cache: Path) -> None:
    def fail(folder: Path) -> None:
        fill(folder)
        raise KeyError("no such tensor")

    with pytest.raises(KeyError, match="no such tensor"):
        cached_folder("model", fail)
    assert not (cache / "model").exists()
    assert not list(cache.glob(".unfinished*"))


def test_a_write_error_names_the_folder_and_the_fix(cache: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(CacheError, match=r"Cannot write .*cory-rllib/model: File too large.*XDG_CACHE_HOME"):
            cached_folder("model", lambda folder: (folder / "weights").write_bytes(bytes(2000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(cache.glob("*model*/*"))


def test_without_an_absolute_xdg_cache_home_the_cache_is_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cached_folder("model", fill) == tmp_path / ".cache" / "cory-rllib" / "model"
