"""Checks that the processes of a run fit on a cluster's nodes, each process on one node.

Ray may place the processes of a run on any nodes: they are separate actors, or in a Tune trial bundles of a placement
group with the PACK strategy. The nodes' total resources count, not those that are free now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from launch.console.errors import CommandError
from policies.settings.processes import Process

if TYPE_CHECKING:
    from policies.settings.memory import Memory

GB = 1e9
TOLERANCE = 1e-6
MAX_SHOWN_NODES = 4


@dataclass
class Node:
    """The remaining resources of a node."""

    name: str
    cpus: float
    gpus: list[float]
    memory: float
    """Bytes of memory that Ray may allocate on the node."""
    gpu_memory: float | None = None
    """Bytes per GPU; None: unknown."""
    processes: list[str] = field(default_factory=list)
    """The processes placed on the node, such as `2 runners`."""


class Shortfall(NamedTuple):
    """Processes of one kind that do not fit on the nodes."""

    kind: Process
    num_unplaced: int
    reasons: list[str]
    """Missing resources, one reason per node."""

    def __str__(self) -> str:
        reasons = self.reasons[:MAX_SHOWN_NODES]
        if more := len(self.reasons) - len(reasons):
            reasons.append(f"and {more} more nodes")
        missing = "; ".join(reasons) or "the cluster has no nodes"
        return f"no room for {self.num_unplaced} of {count_noun(self.kind.count, self.kind.name)}: {missing}"


def make_node(address: str, resources: Mapping[str, float]) -> Node:
    """Returns a node with the total resources that Ray reports."""
    memory = resources.get("memory", 0.0) + resources.get("object_store_memory", 0.0)
    return Node(f"node {address}", resources.get("CPU", 0.0), [1.0] * int(resources.get("GPU", 0)), memory)


def alive_nodes() -> list[Node]:
    """Returns the living nodes of the current Ray cluster."""
    import ray

    return [make_node(node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]]


def check_placement(kinds: Sequence[Process], nodes: Sequence[Node]) -> None:
    """Checks that processes fit on nodes. Otherwise Ray would wait silently."""
    _, shortfalls = pack(kinds, nodes)
    if shortfalls:
        raise CommandError(
            f"Ray has {'; '.join(map(str, shortfalls))}. Request fewer processes or fewer resources per process (see "
            "`cory plan`), or add nodes."
        )


def count_noun(count: int, name: str) -> str:
    """Returns `1 runner` or `2 runners`."""
    return f"{count} {name}{'s' * (count > 1)}"


def pack(
    kinds: Sequence[Process], nodes: Sequence[Node], needs: Mapping[str, Sequence[Memory]] | None = None
) -> tuple[list[Node], list[Shortfall]]:
    """Places processes on nodes by first fit, the largest requests first.

    On heterogeneous nodes, first fit can miss a valid placement, as Ray's own placement can (`UNCHECKED` skips the
    check).

    Args:
        nodes: with their total resources; not modified.
        needs: memory of each kind of process, by name, if memory must fit too.

    Returns:
        Copies of the nodes with their processes and remaining resources, and the processes that do not fit.
    """
    ordered = sorted(kinds, key=lambda kind: (kind.gpus, kind.cpus), reverse=True)
    filled = deepcopy(list(nodes))
    shortfalls = [_place_on_nodes(kind, filled, (needs or {}).get(kind.name, ())) for kind in ordered]
    return filled, [shortfall for shortfall in shortfalls if shortfall is not None]


def _place_on_nodes(kind: Process, nodes: Sequence[Node], needs: Sequence[Memory]) -> Shortfall | None:
    """Places as many processes of a kind as possible on nodes; returns the rest, if any."""
    host = sum(need.host + (need.total if need.device == "cpu" else 0) for need in needs)
    device = sum(need.total for need in needs if need.device != "cpu")
    counts = [0] * len(nodes)
    for _ in range(kind.count):
        fitting = (index for index, node in enumerate(nodes) if not _shortage(node, kind, host, device))
        first = next(fitting, None)
        if first is None:
            break
        _allocate(nodes[first], kind, host)
        counts[first] += 1
    for node, count in zip(nodes, counts, strict=True):
        if count:
            node.processes.append(count_noun(count, kind.name))
    left = kind.count - sum(counts)
    return Shortfall(kind, left, sorted({_shortage(node, kind, host, device) for node in nodes})) if left else None


def _shortage(node: Node, kind: Process, host: float, device: float) -> str:
    """Returns the resources that a node lacks for one more process, as text; empty if it fits.

    `host` and `device` are the bytes of memory and of GPU memory per process.
    """
    missing = [f"{max(node.cpus, 0.0):g} CPUs"] if node.cpus < kind.cpus - TOLERANCE else []
    if kind.gpus and not _pick_gpus(node, kind.gpus):
        missing.append(f"{sum(node.gpus):g} GPUs")
    if missing:
        return f"{node.name} has {' and '.join(missing)} left"
    share = min(kind.gpus, 1.0)
    if node.gpu_memory is not None and kind.gpus and device > node.gpu_memory * share:
        size = f"{share:g} of a GPU is {node.gpu_memory * share / GB:.1f} GB"
        return f"{node.name}: {size}, but a {kind.name} needs {device / GB:.1f} GB"
    if host > node.memory:
        return f"{node.name} has {node.memory / GB:.1f} GB of memory left, but a {kind.name} needs {host / GB:.1f} GB"
    return ""


def _pick_gpus(node: Node, amount: float) -> list[int]:
    """Returns indices of GPUs that provide `amount`: entire GPUs, or a fraction of one; empty if that is impossible."""
    if amount < 1:
        return [k for k, free in enumerate(node.gpus) if free >= amount - TOLERANCE][:1]
    free_gpus = [k for k, free in enumerate(node.gpus) if free == 1][: int(amount)]
    return free_gpus if len(free_gpus) == amount else []


def _allocate(node: Node, kind: Process, host: float) -> None:
    node.cpus -= kind.cpus
    for k in _pick_gpus(node, kind.gpus) if kind.gpus else []:
        node.gpus[k] -= min(kind.gpus, 1.0)
    node.memory -= host
