"""Whether nodes have room for what a run asks of Ray: each process whole, on one node.

Ray may start the processes of a run anywhere: they are actors by themselves, and in a trial of Tune bundles of one
placement group, which is kept together only as far as that is possible. What nodes have counts, not what is free now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from launch.console.errors import CommandError
from policies.settings.processes import OWN, Process

if TYPE_CHECKING:
    from policies.settings.memory import Memory

GB = 1e9
ROUNDING = 1e-6
"""By which parts of a resource may miss the whole."""
SHOWN = 4
"""Nodes that a refusal names."""


@dataclass
class Node:
    """What a node has left."""

    name: str
    cpus: float
    gpus: list[float]
    custom: dict[str, float]
    memory: float
    """Bytes that Ray may give out there."""
    gpu_memory: float | None = None
    """Bytes of each GPU; None: not known from here."""
    holds: list[str] = field(default_factory=list)


class Shortfall(NamedTuple):
    """Processes of one kind that find no room."""

    kind: Process
    left: int
    reasons: list[str]
    """Of each node."""


def make_node(address: str, resources: Mapping[str, float]) -> Node:
    """Returns a node with all that Ray says it has."""
    custom = {name: amount for name, amount in resources.items() if name not in OWN and not name.startswith("node:")}
    memory = resources.get("memory", 0.0) + resources.get("object_store_memory", 0.0)
    return Node(f"node {address}", resources.get("CPU", 0.0), [1.0] * int(resources.get("GPU", 0)), custom, memory)


def alive_nodes() -> list[Node]:
    """Returns the living nodes of the present Ray."""
    import ray

    return [make_node(found["NodeManagerAddress"], found["Resources"]) for found in ray.nodes() if found["Alive"]]


def check_placement(kinds: Sequence[Process], nodes: Sequence[Node]) -> None:
    """Refuses processes for which there is no room: Ray would wait for it without a word.

    Raises:
        CommandError: with what nodes lack, and what to change.
    """
    _, lacking = pack(kinds, nodes)
    if not lacking:
        return
    parts = []
    for kind, left, reasons in lacking:
        resources = ", ".join(f"{name}={amount:g}" for name, amount in _resources(kind).items())
        more = [f"and {len(reasons) - SHOWN} more nodes"] if len(reasons) > SHOWN else []
        why = "; ".join(reasons[:SHOWN] + more) or "the cluster has no nodes"
        wanted = count_noun(kind.count, kind.name) + (f" with {resources}" if resources else "")
        parts.append(f"{left} of {wanted} ({why})")
    placed = (kind for kind in kinds if _resources(kind) and kind not in [lack.kind for lack in lacking])
    others = [count_noun(kind.count, kind.name) for kind in placed]
    beside = f", beside {' and '.join(others)}" if others else ""
    raise CommandError(
        f"Ray has no room for {', and none for '.join(parts)}{beside}. Ask for fewer processes, or for less for each "
        "(`cory plan` shows them), or add nodes."
    )


def count_noun(count: int, name: str) -> str:
    """Returns `1 runner` or `2 runners`."""
    return f"{count} {name}{'s' * (count > 1)}"


def pack(
    kinds: Sequence[Process], nodes: Sequence[Node], needs: Mapping[str, Sequence[Memory]] | None = None
) -> tuple[list[Node], list[Shortfall]]:
    """Puts every process on the first node that has room, those that ask for most first.

    On nodes of many kinds that can miss room that there is, as Ray's own placing can (`UNCHECKED` asks Ray all the
    same).

    Args:
        kinds: of processes, each of another name.
        nodes: with all that they have; they stay as they are.
        needs: the memory of each kind of process, where that must have room too.

    Returns:
        The nodes, with what they then hold and have left, and what finds no room.
    """
    ordered = sorted(kinds, key=lambda kind: (kind.gpus, len(kind.custom), kind.cpus), reverse=True)
    filled = deepcopy(list(nodes))
    return filled, [lack for kind in ordered if (lack := _fill(kind, filled, (needs or {}).get(kind.name, ())))]


def _fill(kind: Process, nodes: Sequence[Node], needs: Sequence[Memory]) -> Shortfall | None:
    """Puts as many processes of a kind as there are, or is room for, on nodes; says what the rest lack."""
    host = sum(need.host + (need.total if need.device == "cpu" else 0) for need in needs)
    device = sum(need.total for need in needs if need.device != "cpu")
    counts = [0] * len(nodes)
    for _ in range(kind.count):
        fitting = (number for number, node in enumerate(nodes) if not _shortage(node, kind, host, device))
        first = next(fitting, None)
        if first is None:
            break
        _take(nodes[first], kind, host)
        counts[first] += 1
    for node, count in zip(nodes, counts, strict=True):
        if count:
            node.holds.append(count_noun(count, kind.name))
    left = kind.count - sum(counts)
    return Shortfall(kind, left, sorted({_shortage(node, kind, host, device) for node in nodes})) if left else None


def _resources(kind: Process) -> dict[str, float]:
    """Returns what each process asks for."""
    resources = {"CPU": kind.cpus, "GPU": kind.gpus, **kind.custom}
    return {name: amount for name, amount in resources.items() if amount}


def _shortage(node: Node, kind: Process, host: float, device: float) -> str:
    """Returns what a node lacks to hold one more process, or nothing.

    Args:
        node: with what it has left.
        kind: of the process.
        host: bytes of memory that it takes.
        device: bytes of GPU memory.
    """
    has = {"CPU": node.cpus, "GPU": sum(node.gpus), **node.custom}
    short = [
        f"{max(has.get(name, 0.0), 0.0):g} {name}{'s' * (name in OWN)}"
        for name, amount in _resources(kind).items()
        if (not _gpus(node, amount) if name == "GPU" else has.get(name, 0.0) < amount - ROUNDING)
    ]
    if short:
        return f"{node.name} has {' and '.join(short)} left"
    part = min(kind.gpus, 1.0)
    if node.gpu_memory is not None and kind.gpus and device > node.gpu_memory * part:
        return f"{node.name}: {part:g} of a GPU is {node.gpu_memory * part / GB:.1f} GB"
    return f"{node.name} has {node.memory / GB:.1f} GB of memory left" if host > node.memory else ""


def _gpus(node: Node, wanted: float) -> list[int]:
    """Returns the GPUs that would give `wanted`: whole ones, or a part of one; none if they cannot."""
    if wanted < 1:
        return [k for k, free in enumerate(node.gpus) if free >= wanted - ROUNDING][:1]
    whole = [k for k, free in enumerate(node.gpus) if free == 1][: int(wanted)]
    return whole if len(whole) == wanted else []


def _take(node: Node, kind: Process, host: float) -> None:
    node.cpus -= kind.cpus
    for k in _gpus(node, kind.gpus) if kind.gpus else []:
        node.gpus[k] -= min(kind.gpus, 1.0)
    for name, amount in kind.custom.items():
        node.custom[name] -= amount
    node.memory -= host
