"""`cory plan`: what a run would need, where, and whether the cluster or this machine has it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.command import CommandError, Parser, run

if TYPE_CHECKING:
    from launch.memory import Memory
    from policies.placement import Process
    from policies.settings import Settings

GB = 1e9
LACKING = 1
"""Exit code where something is missing."""

EPILOG = """The cluster is the one that RAY_ADDRESS names, else this machine. Memory is an estimate (docs/plan.md).

exit codes:
  0 the run fits; 1 it does not; 2 a mistake that you can correct.
"""


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


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Returns:
        0 when the run fits, 1 when it does not, 2 after a user's mistake.
    """
    parser = Parser(
        prog="cory plan",
        usage="cory plan [PRESET] [-c FILE ...] [key=value ...] [options]",
        description="Show where a run's processes would go, the memory they need, and whether it is there.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="PRESET, key=value", help="as for `cory train`")
    parser.add_argument("-c", "--config", action="append", default=[], type=Path, metavar="FILE", help="YAML settings")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_intermixed_args(argv)
    return run(lambda: plan(options.words, options.config, options.debug), debug=options.debug)


def plan(words: Sequence[str], files: Sequence[Path] = (), debug: bool = False) -> int:
    """Prints the plan.

    Args:
        words: a preset, or none, and settings as `key=value`.
        files: YAML files of settings.
        debug: show the libraries' logs.

    Raises:
        CommandError: more than one preset, no cluster at RAY_ADDRESS, or a driver that cannot learn where Ray does not
            know of it.
        SettingsError: a setting is wrong.
    """
    from launch import memory, session
    from launch.configuration import DEFAULT_PRESET, resolve
    from policies.placement import processes

    presets = [word for word in words if "=" not in word]
    if len(presets) > 1:
        raise CommandError(f"One preset at a time: {' and '.join(presets)} cannot be combined. Settings are key=value.")
    settings = resolve(presets[0] if presets else DEFAULT_PRESET, files, [word for word in words if "=" in word])
    session.quiet_libraries(debug)
    needs = _needs(settings, memory.shape(settings))
    kinds = processes(settings)
    if "RAY_ADDRESS" in os.environ:
        nodes = _cluster()
    else:
        session.check_driver(settings)
        nodes = [_machine(settings)]
    _show(settings, kinds, needs)
    lacking = place(kinds, needs, nodes)
    print()
    for node in nodes:
        print(f"{node.name}: {', '.join(node.holds) or 'nothing'}")
    for sentence in lacking:
        print(f"Lacking: {sentence}")
    print("It does not fit." if lacking else "It fits.")
    return LACKING if lacking else 0


def _needs(settings: Settings, model: Any) -> dict[str, list[Memory]]:
    """Returns the memory of each kind of process; a driver may do several kinds of work."""
    from launch import memory

    learns, generates = memory.learner(settings, model), memory.runner(settings, model)
    leads = memory.Memory("cpu", {"libraries": memory.LIBRARIES["learner"]}, 0.0)
    needs = {"runner": [generates], "learner": [learns], "driver": [leads if settings.num_learners else learns]}
    if settings.num_runners == 0:
        needs["driver"].append(generates)
    return needs


def _show(settings: Settings, kinds: Sequence[Process], needs: dict[str, list[Memory]]) -> None:
    engines = 1 if settings.weights == "lora" else settings.num_agents
    does = {
        "driver": " and ".join(
            ["leads"] + ["learns"] * (settings.num_learners == 0) + ["generates"] * (settings.num_runners == 0)
        ),
        "runner": _counted(engines, "vLLM engine") if settings.backend == "vllm" else "transformers",
        "learner": "learns",
    }
    if settings.tensor_parallel > 1:
        over = "GPUs" if settings.gpus_per_runner else "processes"
        does["runner"] += f", {'each ' * (engines > 1)}over {settings.tensor_parallel} {over}"
    print(f"{'process':<16}{'CPUs':>5}{'GPUs':>6}  memory of each, estimated (GB)")
    for kind in kinds:
        custom = "".join(f", {amount:g} {name}" for name, amount in kind.custom.items())
        what = " + ".join(_size(need, settings.tensor_parallel) for need in needs[kind.name])
        print(
            f"{_counted(kind.count, kind.name):<16}{kind.cpus:>5g}{kind.gpus:>6g}  {what} ({does[kind.name]}{custom})"
        )
        for need in needs[kind.name]:
            parts = ", ".join(f"{name} {size / GB:.2f}" for name, size in need.parts.items() if size >= 5e6)
            print(f"{'':<29}{parts}")


def _size(need: Memory, tensor_parallel: int) -> str:
    if need.share is not None and tensor_parallel > 1:
        where = f" of each of {tensor_parallel} GPUs, {need.host / GB:.1f} beside them"
        return f"{need.total / GB:.1f}{where}; its engines take {need.share:.0%} of each"
    where = "" if need.device == "cpu" else f" of a GPU, {need.host / GB:.1f} beside it"
    if need.share is not None:
        where += f"; its engines take {need.share:.0%} of one"
    return f"{need.total / GB:.1f}{where}"


def _counted(count: int, name: str) -> str:
    return f"{count} {name}{'s' * (count > 1)}"


def place(kinds: Sequence[Process], needs: dict[str, list[Memory]], nodes: list[Node]) -> list[str]:
    """Puts every process on the first node that has room, those that ask for most first.

    Returns:
        A sentence on each kind that found no room; `nodes` say what they hold.
    """
    lacking = []
    for kind in sorted(kinds, key=lambda kind: (kind.gpus, len(kind.custom), kind.cpus), reverse=True):
        host = sum(need.host + (need.total if need.device == "cpu" else 0) for need in needs[kind.name])
        device = sum(need.total for need in needs[kind.name] if need.device != "cpu")
        reasons: list[str] = []
        left = kind.count
        while left:
            found = [_lack(node, kind, host, device) for node in nodes]
            if None not in found:
                reasons = sorted({reason for reason in found if reason})
                break
            _take(nodes[found.index(None)], kind, host, device)
            left -= 1
        for node in nodes:
            if count := node.holds.count(kind.name):
                node.holds = [held for held in node.holds if held != kind.name] + [_counted(count, kind.name)]
        if left:
            why = "; ".join(reasons) or "the cluster has no nodes"
            lacking.append(f"no room for {left} of {_counted(kind.count, kind.name)}: {why}.")
    return lacking


def _lack(node: Node, kind: Process, host: float, device: float) -> str | None:
    """Returns what a node lacks to hold one more process, or None."""
    if kind.cpus > node.cpus:
        return f"{node.name} has {node.cpus:g} CPUs left"
    if kind.gpus and not _gpus(node, kind.gpus):
        return f"{node.name} has {sum(node.gpus):g} GPUs left"
    for name, amount in kind.custom.items():
        if amount > node.custom.get(name, 0):
            return f"{node.name} has {node.custom.get(name, 0):g} {name} left"
    part = min(kind.gpus, 1.0)
    if node.gpu_memory is not None and kind.gpus and device > node.gpu_memory * part:
        return f"{node.name}: {part:g} of a GPU is {node.gpu_memory * part / GB:.1f} GB"
    if host > node.memory:
        return f"{node.name} has {node.memory / GB:.1f} GB of memory left"
    return None


def _gpus(node: Node, wanted: float) -> list[int]:
    """Returns the GPUs that would give `wanted`: whole ones, or a part of one; none if they cannot."""
    if wanted < 1:
        return [k for k, free in enumerate(node.gpus) if free >= wanted - 1e-9][:1]
    whole = [k for k, free in enumerate(node.gpus) if free == 1][: int(wanted)]
    return whole if len(whole) == wanted else []


def _take(node: Node, kind: Process, host: float, device: float) -> None:
    node.cpus -= kind.cpus
    for k in _gpus(node, kind.gpus) if kind.gpus else []:
        node.gpus[k] -= min(kind.gpus, 1.0)
    for name, amount in kind.custom.items():
        node.custom[name] -= amount
    node.memory -= host
    node.holds.append(kind.name)


def _machine(settings: Settings) -> Node:
    """Returns this machine, where `cory train` gives out as many CPUs as are asked for."""
    import psutil
    import torch

    from launch.session import logical_cpus

    count = torch.cuda.device_count()
    own = os.cpu_count() or 1
    asked = logical_cpus(settings)
    return Node(
        f"this machine ({own} CPUs{f', shared by processes that ask for {asked}' if asked > own else ''})",
        float(max(own, asked)),
        [1.0] * count,
        {},
        float(psutil.virtual_memory().total),
        float(torch.cuda.get_device_properties(0).total_memory) if count else None,
    )


def _cluster() -> list[Node]:
    """Returns the living nodes of the cluster that RAY_ADDRESS names, with all that they have.

    Raises:
        CommandError: none answers.
    """
    import ray

    from launch.session import join

    if ray.is_initialized():
        return _nodes(ray.nodes())
    join(log_to_driver=False, logging_level="ERROR", configure_logging=False)
    try:
        return _nodes(ray.nodes())
    finally:
        ray.shutdown()


def _nodes(found: Sequence[dict[str, Any]]) -> list[Node]:
    from policies.placement import OWN

    nodes = []
    for node in found:
        has = node["Resources"]
        if node["Alive"]:
            given = {name: amount for name, amount in has.items() if name not in OWN and not name.startswith("node:")}
            memory = has.get("memory", 0.0) + has.get("object_store_memory", 0.0)
            gpus = [1.0] * int(has.get("GPU", 0))
            nodes.append(Node(f"node {node['NodeManagerAddress']}", has.get("CPU", 0.0), gpus, given, memory))
    return nodes


if __name__ == "__main__":
    raise SystemExit(main())
