"""Processes that end with the one that started them, however that ends."""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess


def end_with_parent() -> None:
    """Kills this process as soon as its parent has ended; does nothing where `multiprocessing` did not start it.

    vLLM's engines do not look at their parent, and their workers not while they start (0.32): a runner that is killed
    would leave them, and the devices occupied.
    """
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_outlive, args=(parent,), daemon=True).start()


def _outlive(parent: BaseProcess) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
