"""`exit_with_parent`: no orphaned processes."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import get_context
from typing import Any

import psutil

from policies.compat.vllm import exit_with_parent


def sleep_with_parent() -> None:
    exit_with_parent()
    time.sleep(60)


def start_child(pids: Any) -> None:
    child = get_context("spawn").Process(target=sleep_with_parent)
    child.start()
    pids.put(child.pid)
    child.join()


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_process_ends_when_its_parent_is_killed() -> None:
    context = get_context("spawn")
    pids = context.Queue()
    parent = context.Process(target=start_child, args=(pids,))
    parent.start()
    child = pids.get(timeout=60)
    assert is_running(child)
    assert parent.pid is not None
    os.kill(parent.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)
