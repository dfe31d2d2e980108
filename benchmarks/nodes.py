"""A Ray cluster of several nodes on this machine, each a raylet with its own processes; nodes can be killed."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil
from ray.cluster_utils import Cluster

RUNNER = "ray::ChainRunner"
LEARNER = "ray::_WrappedExecutable"
"""How the commands of runners and learners start; the latter's class is one that Ray Train makes."""
ENGINE = "VLLM::"
"""How those of a vLLM engine's own processes start."""


class Nodes:
    """A head with one CPU, the driver's, and worker nodes.

    A separate process starts them, because Ray kills every process that was connected to a lost head after a minute.
    """

    def __init__(self, folder: Path) -> None:
        """Starts the head.

        Args:
            folder: for Ray's temporary files, with a short path; no other Ray on this machine finds this cluster.
        """
        context = multiprocessing.get_context("spawn")
        self._orders, theirs = context.Pipe()
        self._starter = context.Process(target=_start_nodes, args=(theirs, str(folder)), daemon=True)
        self._starter.start()
        self.address = str(self._answer())
        """Value of `RAY_ADDRESS` for drivers."""

    def add(self, cpus: int) -> int:
        """Starts a worker node, and returns its number, when it has joined."""
        self._orders.send(("add", cpus))
        return int(self._answer())

    def lose(self, node: int) -> None:
        """Ends all processes of a node by SIGKILL at once, as when its machine is switched off."""
        self._orders.send(("lose", node))
        self._answer()

    def close(self) -> None:
        """Ends all nodes, the head too."""
        assert self._starter.pid is not None
        kill(*psutil.Process(self._starter.pid).children(recursive=True))
        self._starter.kill()
        self._starter.join()

    def _answer(self) -> Any:
        if not self._orders.poll(120.0):
            raise TimeoutError("Ray's processes did not start, or did not end.")
        return self._orders.recv()


def _start_nodes(orders: Connection, folder: str) -> None:
    os.environ["RAY_TMPDIR"] = folder
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    orders.send(cluster.address)
    nodes: list[Any] = []
    while True:
        order, argument = orders.recv()
        if order == "add":
            nodes.append(cluster.add_node(num_cpus=argument))
            orders.send(len(nodes) - 1)
            continue
        processes = [info.process for kind in nodes[argument].all_processes.values() for info in kind]
        for parent in [psutil.Process(process.pid) for process in processes if process.poll() is None]:
            kill(parent, *parent.children(recursive=True))
        cluster.remove_node(nodes[argument], allow_graceful=False)
        orders.send(None)


def kill(*processes: psutil.Process) -> None:
    """Sends SIGKILL to processes; some may have ended already."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def named(start: str) -> list[psutil.Process]:
    """This process's living descendants whose command starts like this, such as `ray::ChainRunner`."""
    results = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and " ".join(process.cmdline()).startswith(start):
                results.append(process)
        except psutil.Error:
            continue  # it has just ended
    return results


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
