"""A Ray cluster of several nodes on this machine, each a raylet with processes of its own, and nodes that are lost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil
from ray.cluster_utils import Cluster

RUNNER = "ray::ChainRunner"
LEARNER = "ray::_WrappedExecutable"
"""How the commands of runners and learners start; the latter's class is one that Ray Train makes."""


class Nodes:
    """A head with one CPU, the driver's, and worker nodes."""

    def __init__(self, folder: Path) -> None:
        """Starts the head.

        Args:
            folder: for Ray's temporary files, with a short path; no other Ray on this machine finds this cluster.
        """
        self.folder = folder
        with self._own_folder():
            self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})

    @property
    def address(self) -> str:
        """What drivers name in `RAY_ADDRESS`."""
        return str(self._cluster.address)

    def add(self, cpus: int) -> Any:
        """Starts a worker node and returns it, when it has joined."""
        with self._own_folder():
            return self._cluster.add_node(num_cpus=cpus)

    def lose(self, node: Any) -> None:
        """Ends all processes of a node by SIGKILL at once, as when its machine is switched off."""
        processes = [info for kind in node.all_processes.values() for info in kind]
        for parent in [psutil.Process(info.process.pid) for info in processes if info.process.poll() is None]:
            kill(parent, *parent.children(recursive=True))
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        """Ends all nodes, the head last."""
        for node in [*self._cluster.worker_nodes, self._cluster.head_node]:
            self.lose(node)

    @contextmanager
    def _own_folder(self) -> Iterator[None]:
        before = os.environ.get("RAY_TMPDIR")
        os.environ["RAY_TMPDIR"] = str(self.folder)
        try:
            yield
        finally:
            if before is None:
                del os.environ["RAY_TMPDIR"]
            else:
                os.environ["RAY_TMPDIR"] = before


def kill(*processes: psutil.Process) -> None:
    """Sends SIGKILL to processes, of which some may have ended."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def named(start: str) -> list[psutil.Process]:
    """This process's living descendants whose command starts like this, such as `ray::ChainRunner`."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and " ".join(process.cmdline()).startswith(start):
                found.append(process)
        except psutil.Error:
            continue  # it has just ended
    return found


def wait_until(true: Callable[[], object], seconds: float, every: float = 0.1) -> None:
    """Waits for something to become true.

    Raises:
        TimeoutError: it did not.
    """
    deadline = monotonic() + seconds
    while not true():
        if monotonic() > deadline:
            raise TimeoutError(f"Not so after {seconds:.0f} s.")
        sleep(every)
