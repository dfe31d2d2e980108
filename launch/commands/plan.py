"""`cory plan`: what a run would need, where, and whether the cluster or this machine has it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launch.cluster.room import GB, Node, counted, living_nodes, pack
from launch.console.errors import CommandError
from launch.console.parser import Parser, local_path, run

if TYPE_CHECKING:
    from policies.settings.memory import Memory, Shape
    from policies.settings.placement import Process
    from policies.settings.settings import Settings

LACKING = 1
"""Exit code where something is missing."""

EPILOG = """The cluster is the one that RAY_ADDRESS names, else this machine; with --nodes one that need not be there.
Memory is an estimate (docs/plan.md).

exit codes:
  0 the run fits; 1 it does not; 2 a mistake that you can correct.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Returns:
        0 when the run fits, 1 when it does not, 2 after a user's mistake.
    """
    parser = Parser(
        prog="cory plan",
        usage="cory plan [PRESET|FILE] [-c FILE ...] [key=value ...] [options]",
        description="Show where a run's processes would go, the memory they need, and whether it is there.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="PRESET|FILE, key=value", help="as for `cory train`")
    parser.add_argument(
        "-c", "--config", action="append", default=[], type=local_path, metavar="FILE", help="YAML settings"
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="plan for N machines alike, as the other options say")
    parser.add_argument("--cpus", type=int, metavar="N", help="CPUs of each (default: 96)")
    parser.add_argument("--memory", type=float, metavar="GB", help="memory of each (default: 1000)")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of each (default: 8)")
    parser.add_argument("--gpu-memory", type=float, metavar="GB", help="memory of each GPU (default: 80)")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_intermixed_args(argv)

    def do() -> int:
        o = options
        asked = {"cpus": o.cpus, "memory": o.memory, "gpus": o.gpus, "gpu_memory": o.gpu_memory}
        asked = {name: value for name, value in asked.items() if value is not None}
        if asked and o.nodes is None:
            name = next(iter(asked)).replace("_", "-")
            raise CommandError(f"--{name} is of machines that --nodes counts. Add --nodes.")
        return plan(o.words, o.config, o.debug, None if o.nodes is None else machines(o.nodes, **asked))

    return run(do, debug=options.debug)


def machines(count: int, cpus: int = 96, memory: float = 1000, gpus: int = 8, gpu_memory: float = 80) -> list[Node]:
    """Returns machines that need not be there; memory in GB.

    Raises:
        CommandError: there would be none, or less than nothing in them.
    """
    if count < 1 or min(cpus, memory, gpus, gpu_memory) < 0:
        raise CommandError(f"--nodes {count}: name 1 machine or more, and nothing negative of what they have.")
    of_gpu = gpu_memory * GB if gpus else None
    return [Node(f"node {n + 1} of {count}", cpus, [1.0] * gpus, {}, memory * GB, of_gpu) for n in range(count)]


def plan(words: Sequence[str], files: Sequence[Path] = (), debug: bool = False, nodes: list[Node] | None = None) -> int:
    """Prints the plan.

    Args:
        words: a preset or a file of settings, or neither, and settings as `key=value`.
        files: YAML files of settings.
        debug: show the libraries' logs.
        nodes: the machines; None: those of the cluster, or this one.

    Raises:
        CommandError: more than one preset or file, no cluster at RAY_ADDRESS, or a driver that cannot learn where Ray
            does not know of it.
        DeviceError: PyTorch or vLLM cannot compute here on what the settings ask for.
        SettingsError: a setting is wrong.
    """
    from launch.cluster import session
    from launch.cluster.gpus import check_gpus
    from launch.console.configuration import asked
    from policies.models.model_check import check_folder
    from policies.settings import memory
    from policies.settings.placement import processes

    settings = asked(words, files).settings()
    here = nodes is None and "RAY_ADDRESS" not in os.environ
    session.quiet_libraries(debug)
    for path in settings.model_paths.values():
        check_folder(path, weights=nodes is None)  # machines that need not be there need not have them
    tokenizers = settings.make_tokenizers()
    for policy in settings.modules:
        settings.vocab_size(tokenizers, policy)
    settings.chat_formats(tokenizers)
    models = memory.shapes(settings)
    needs = _needs(settings, models)
    kinds = processes(settings)
    for node in nodes or ():  # all that is asked for beside, as nobody said which have it
        node.custom.update((name, float("inf")) for kind in kinds for name in kind.custom)
    if nodes is None and "RAY_ADDRESS" in os.environ:
        nodes = _cluster()
    elif nodes is None:
        session.check_driver(settings)
        nodes = [_machine(settings)]
    _show(settings, kinds, needs)
    if len(set(settings.models.values())) > 1:
        print()
        for (policy, name), model in zip(settings.models.items(), models, strict=True):
            print(f"{policy}: {name}, {model.parameters / 1e6:,.1f} M parameters")
    print()
    for family in dict.fromkeys(settings.families().values()):
        print(f"model family {family}")
    filled, lacking = pack(kinds, nodes, needs)
    print()
    for node in filled:
        print(f"{node.name}: {', '.join(node.holds) or 'nothing'}")
    for lack in lacking:
        why = "; ".join(lack.reasons) or "the cluster has no nodes"
        print(f"Lacking: no room for {lack.left} of {counted(lack.kind.count, lack.kind.name)}: {why}.")
    rooms = [node.gpu_memory for node in nodes if node.gpu_memory]
    for lack in lacking if rooms else ():
        if sum(need.total for need in needs[lack.kind.name] if need.device == "cuda") > max(rooms) * lack.kind.gpus:
            print(_what_fits(settings, lack.kind.name, max(rooms)))
    if not lacking and here:
        check_gpus(settings)
    print("It does not fit." if lacking else "It fits.")
    return LACKING if lacking else 0


def _needs(settings: Settings, models: Sequence[Shape]) -> dict[str, list[Memory]]:
    """Returns the memory of each kind of process; a driver may do several kinds of work."""
    from policies.settings import memory

    learns, generates = memory.learner(settings, models), memory.runner(settings, models)
    leads = memory.Memory("cpu", {"libraries": memory.LIBRARIES["learner"]}, 0.0)
    needs = {"runner": [generates], "learner": [learns], "driver": [leads if settings.num_learners else learns]}
    if settings.num_runners == 0:
        needs["driver"].append(generates)
    return needs


def _what_fits(settings: Settings, kind: str, room: float) -> str:
    """Returns over how many GPUs the models of a kind of process would fit."""
    from policies.settings import memory

    gpus = f"GPUs of {room / GB:g} GB"
    if kind == "runner":
        parts = memory.least_parts(settings, room) if settings.backend == "vllm" else None
        if parts is None:
            return f"A runner's engines fit on no number of {gpus} up to 8."
        return f"A runner's engines fit on {gpus} with tensor_parallel={parts} gpus_per_runner={parts}."
    ways: dict[int, str] = {}
    for offload in dict.fromkeys((settings.offload_optimizer, True)):
        shards = memory.least_shards(settings.model_copy(update={"offload_optimizer": offload}), room)
        if shards is not None and shards not in ways:
            words = f"shards_per_policy={shards} num_learners={shards * len(settings.modules)} gpus_per_learner=1"
            ways[shards] = words + " offload_optimizer=true" * offload
    if not ways:
        return f"Learners fit on no number of {gpus} up to {memory.SPLITS[-1]} for each LLM."
    return f"Learners fit on {gpus} with {', or with '.join(ways.values())}."


def _show(settings: Settings, kinds: Sequence[Process], needs: dict[str, list[Memory]]) -> None:
    engines = 1 if settings.weights == "lora" else len(settings.modules)
    does = {
        "driver": " and ".join(
            ["leads"] + ["learns"] * (settings.num_learners == 0) + ["generates"] * (settings.num_runners == 0)
        ),
        "runner": counted(engines, "vLLM engine") if settings.backend == "vllm" else "transformers",
        "learner": "learns",
    }
    if settings.tensor_parallel > 1:
        over = "GPUs" if settings.gpus_per_runner else "processes"
        does["runner"] += f", {'each ' * (engines > 1)}over {settings.tensor_parallel} {over}"
    print(f"{'process':<16}{'CPUs':>5}{'GPUs':>6}  memory of each, estimated (GB)")
    for kind in kinds:
        custom = "".join(f", {amount:g} {name}" for name, amount in kind.custom.items())
        what = " + ".join(_size(need, settings.tensor_parallel) for need in needs[kind.name])
        print(f"{counted(kind.count, kind.name):<16}{kind.cpus:>5g}{kind.gpus:>6g}  {what} ({does[kind.name]}{custom})")
        for need in needs[kind.name]:
            parts = ", ".join(f"{name} {size / GB:.2f}" for name, size in need.parts.items() if size >= 5e6)
            print(f"{'':<29}{parts}")


def _size(need: Memory, tensor_parallel: int) -> str:
    if need.share is not None and tensor_parallel > 1:
        where = f" of each of {tensor_parallel} GPUs, {need.host / GB:.1f} beside them"
        return f"{need.total / GB:.1f}{where}; its engines take at most {need.share:.0%} of each"
    where = "" if need.device == "cpu" else f" of a GPU, {need.host / GB:.1f} beside it"
    if need.share is not None:
        where += f"; its engines take at most {need.share:.0%} of one"
    return f"{need.total / GB:.1f}{where}"


def _machine(settings: Settings) -> Node:
    """Returns this machine, where `cory train` gives out as many CPUs as are asked for."""
    import psutil
    import torch

    from policies.settings.placement import cpus, processes

    count = torch.cuda.device_count()
    own = os.cpu_count() or 1
    asked = cpus(processes(settings))
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

    from launch.cluster.session import join

    if ray.is_initialized():
        return living_nodes()
    join(log_to_driver=False, logging_level="ERROR", configure_logging=False)
    try:
        return living_nodes()
    finally:
        ray.shutdown()
