"""The machines on which a run may be placed: this one, a cluster's nodes, or hypothetical ones."""

from __future__ import annotations

import os

from launch.cluster import session
from launch.cluster.placement import GB, Node, alive_nodes, count_noun
from policies.settings.hardware import devices
from policies.settings.processes import cpus, processes
from policies.settings.settings import Settings


def make_machines(
    count: int, cpus: int = 96, memory: float = 1000, gpus: int = 8, gpu_memory: float = 80
) -> list[Node]:
    """Returns hypothetical machines; memory in GB."""
    gpu_bytes = gpu_memory * GB if gpus else None
    return [Node(f"node {n + 1} of {count}", cpus, [1.0] * gpus, memory * GB, gpu_bytes) for n in range(count)]


def describe_machine(machine: Node) -> str:
    """Describes a machine of `make_machines`."""
    gpus = f", {count_noun(len(machine.gpus), 'GPU')} of {machine.gpu_memory / GB:g} GB" if machine.gpu_memory else ""
    return f"{machine.cpus:g} CPUs, {machine.memory / GB:g} GB of memory{gpus}"


def this_machine(settings: Settings) -> Node:
    """Returns this machine; `cory train` lets Ray assign as many CPUs as the run requires."""
    import torch

    gpus, available, required = torch.cuda.device_count(), os.cpu_count() or 1, cpus(processes(settings))
    note = f", shared by processes that require {required}" if required > available else ""
    name, num_cpus = f"this machine ({available} CPUs{note})", float(max(available, required))
    return Node(name, num_cpus, [1.0] * gpus, devices.ram_bytes(), devices.gpu_bytes() if gpus else None)


def cluster_nodes() -> list[Node]:
    """Returns the live nodes of the cluster of RAY_ADDRESS, with all their resources."""
    with session.ray_session((), debug=False):
        return alive_nodes()
