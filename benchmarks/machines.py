"""Ray nodes in separate Linux network namespaces, like machines whose network cable can be pulled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

from benchmarks.nodes import kill, wait_until

_START = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-gpus=0", "--disable-usage-stats")
_UP = 120.0  # seconds that a node may take to start on a busy machine


def can_make_networks() -> bool:
    """Whether this process may make network namespaces: it is root, with iproute2 installed."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


class Machines:
    """A head in this process's network, with one CPU, and worker nodes behind a bridge, each in its own network.

    Needs root and iproute2. Drivers name `address` in `RAY_ADDRESS`.
    """

    def __init__(self, folder: Path) -> None:
        """Makes the bridge and starts the head.

        Args:
            folder: for Ray's temporary files and logs, with a short path.
        """
        self._folder = folder
        number = os.getpid() % 250 + 1
        self._bridge, self._network = f"cory{number}", f"10.213.{number}"
        self._nodes: list[subprocess.Popen[bytes]] = []
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self._network}.1/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        self.address = f"{self._network}.1:6399"
        self._head = self._start(
            "head", "--head", f"--node-ip-address={self._network}.1", "--port=6399", "--num-cpus=1",
            "--include-dashboard=false",
        )  # fmt: skip

    def add(self, cpus: int) -> int:
        """Starts a worker node in a new network and returns its number, when it has joined."""
        number = len(self._nodes)
        name, end, inside = self._name(number), f"{self._bridge}h{number}", f"{self._bridge}n{number}"
        address = f"{self._network}.{number + 2}"
        _ip("netns", "add", name)
        _ip("link", "add", end, "type", "veth", "peer", "name", inside)
        _ip("link", "set", inside, "netns", name)
        _ip("link", "set", end, "master", self._bridge, "up")
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", inside)
        for device in (inside, "lo"):
            _ip("-n", name, "link", "set", device, "up")
        words = (f"--address={self.address}", f"--node-ip-address={address}", f"--num-cpus={cpus}")
        self._nodes.append(self._start(name, *words, namespace=("ip", "netns", "exec", name)))
        return number

    def cut(self, node: int) -> None:
        """Pulls a node's cable: its processes keep running, without network.

        Ray declares the node dead a minute later.
        """
        _ip("link", "set", f"{self._bridge}h{node}", "down")

    def close(self) -> None:
        """Ends all nodes and removes their networks."""
        for process in (*self._nodes, self._head):
            with_children = psutil.Process(process.pid)
            kill(with_children, *with_children.children(recursive=True))
            process.wait()
        for number in range(len(self._nodes)):
            _ip("link", "del", f"{self._bridge}h{number}")  # else it stays as long as a process of the node
            _ip("netns", "del", self._name(number))
        _ip("link", "del", self._bridge)

    def _name(self, number: int) -> str:
        return f"{self._bridge}-{number}"

    def _start(self, name: str, *words: str, namespace: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        temporary = self._folder / name
        temporary.mkdir()
        log = temporary / "output.txt"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*namespace, *_START, *words, f"--temp-dir={temporary}"], stdout=output, stderr=output
            )
        wait_until(lambda: "Ray runtime started." in log.read_text() or process.poll() is not None, _UP)
        if process.poll() is not None:
            raise RuntimeError(f"Ray did not start:\n{log.read_text()}")
        return process


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
