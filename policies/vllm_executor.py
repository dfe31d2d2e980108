"""How a vLLM engine that is split over several devices runs them: as vLLM does on one node, by a process for each."""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing import parent_process

from vllm.v1.executor.multiproc_executor import MultiprocExecutor


class OwnedExecutor(MultiprocExecutor):
    """Ends with the process that started its engine, however that ends.

    vLLM's own would go on (0.32): the workers watch the engine, but the engine does not watch its parent, so that a
    runner killed by `kill -9` would leave the devices occupied.
    """

    def _init_executor(self) -> None:
        threading.Thread(target=_end_with_parent, daemon=True).start()
        super()._init_executor()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "the engine runs in a process of its own"
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)  # workers see it, and end
