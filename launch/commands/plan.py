"""`cory plan`: the placement and memory of a run's processes, and whether the cluster or this machine has room."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.cluster.placement import GB, Node, alive_nodes, count_noun, pack
from launch.console.cli import ConfigFiles, Debug, Words

if TYPE_CHECKING:
    from policies.settings.memory import Memory, ModelShape
    from policies.settings.processes import Process
    from policies.settings.settings import Settings

DOES_NOT_FIT = 1
"""Exit code if resources are missing."""


def plan(
    words: Words = None,
    config: ConfigFiles = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Plan for N machines with the hardware below.")
    ] = None,
    cpus: Annotated[int | None, typer.Option(min=0, metavar="N", help="CPUs per machine. [default: 96]")] = None,
    memory: Annotated[
        float | None, typer.Option(min=0, metavar="GB", help="Memory per machine. [default: 1000]")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=0, metavar="N", help="GPUs per machine. [default: 8]")] = None,
    gpu_memory: Annotated[float | None, typer.Option(min=0, metavar="GB", help="Memory per GPU. [default: 80]")] = None,
    debug: Debug = False,
) -> int:
    """Show the placement and memory of a run's processes, and whether they fit.

    Plans for the cluster of RAY_ADDRESS if it is set, else for this machine; with --nodes or another machine option,
    for hypothetical machines. Memory is an estimate (docs/plan.md).

    Exit codes:
      0 the run fits; 1 it does not; 2 a user error.
    """
    from launch.cluster import session
    from launch.cluster.gpus import check_gpus
    from launch.console.configuration import split_arguments
    from policies.models.model_check import check_model_folder
    from policies.settings.memory import model_shapes
    from policies.settings.processes import processes

    settings = split_arguments(words or (), config or ()).settings()
    options = {"cpus": cpus, "memory": memory, "gpus": gpus, "gpu_memory": gpu_memory}
    machine: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    hypothetical = nodes is not None or bool(machine)
    session.quiet_libraries(debug)
    for path in settings.model_paths.values():
        check_model_folder(path, weights=not hypothetical)  # hypothetical machines need no weights
    tokenizers = settings.make_tokenizers()
    for policy_id in settings.policy_ids:
        settings.vocab_size(tokenizers, policy_id)
    settings.chat_formats(tokenizers)
    models = model_shapes(settings)
    kinds, needs = processes(settings), estimate(settings, models)
    if hypothetical:
        machines = make_machines(nodes or 1, **machine)
        for node in machines:  # unlimited custom resources, as the options do not specify them
            node.custom.update((name, float("inf")) for kind in kinds for name in kind.custom)
    elif "RAY_ADDRESS" in os.environ:
        machines = _cluster_nodes()
    else:
        session.check_driver(settings)
        machines = [_this_machine(settings)]
    _print_processes(settings, kinds, needs)
    print()
    families = settings.families()
    for line in dict.fromkeys(
        f"{name}: {model.parameters / 1e6:,.1f} M parameters, model family {families[policy_id]}"
        for (policy_id, name), model in zip(settings.all_models.items(), models, strict=True)
    ):
        print(line)
    filled, shortfalls = pack(kinds, machines, needs)
    print()
    for node in filled:
        print(f"{node.name}: {', '.join(node.processes) or 'nothing'}")
    gpu_bytes = max((node.gpu_memory or 0.0 for node in machines), default=0.0)
    for shortfall in shortfalls:
        reasons = "; ".join(shortfall.reasons) or "the cluster has no nodes"
        requested = count_noun(shortfall.kind.count, shortfall.kind.name)
        print(f"Missing: no room for {shortfall.num_unplaced} of {requested}: {reasons}.")
    for kind in [shortfall.kind for shortfall in shortfalls] if gpu_bytes else ():
        if sum(need.total for need in needs[kind.name] if need.device == "cuda") > gpu_bytes * kind.gpus:
            print(_suggest_gpus(settings, kind.name, gpu_bytes))
    if not shortfalls and not hypothetical and "RAY_ADDRESS" not in os.environ:
        check_gpus(settings)
    print("It does not fit." if shortfalls else "It fits.")
    return DOES_NOT_FIT if shortfalls else 0


def make_machines(
    count: int, cpus: int = 96, memory: float = 1000, gpus: int = 8, gpu_memory: float = 80
) -> list[Node]:
    """Returns hypothetical machines; memory in GB."""
    gpu_bytes = gpu_memory * GB if gpus else None
    return [Node(f"node {n + 1} of {count}", cpus, [1.0] * gpus, {}, memory * GB, gpu_bytes) for n in range(count)]


def estimate(settings: Settings, models: Sequence[ModelShape]) -> dict[str, list[Memory]]:
    """Returns kind of process → its memory; a driver may have several parts."""
    from policies.settings import memory

    learner, runner = memory.estimate_learner(settings, models), memory.estimate_runner(settings, models)
    driver = memory.Memory("cpu", {"libraries": memory.LIBRARIES["learner"]}, 0.0)
    needs = {"runner": [runner], "learner": [learner], "driver": [driver if settings.num_learners else learner]}
    if settings.num_runners == 0:
        needs["driver"].append(runner)
    return needs


def _suggest_gpus(settings: Settings, kind: str, gpu_bytes: float) -> str:
    """Returns a sentence with the number of GPUs of this size on which processes of this kind would fit."""
    from policies.settings import memory

    gpus = f"GPUs of {gpu_bytes / GB:g} GB"
    if kind == "runner":
        parts = memory.min_tensor_parallel_size(settings, gpu_bytes) if settings.backend == "vllm" else None
        if parts is None:
            return f"A runner's engines do not fit even on 8 {gpus}."
        return f"A runner's engines fit on {gpus} with tensor_parallel_size={parts} gpus_per_runner={parts}."
    shards = memory.min_shards(settings, gpu_bytes)
    if shards is None:
        return f"Learners do not fit even on {memory.SHARD_COUNTS[-1]} {gpus} per LLM."
    count = shards * len(settings.policy_ids)
    return f"Learners fit on {gpus} with shards_per_policy={shards} num_learners={count} gpus_per_learner=1."


def _print_processes(settings: Settings, kinds: Sequence[Process], needs: dict[str, list[Memory]]) -> None:
    engines = 1 if settings.weights == "lora" else len(settings.policy_ids)
    work = {
        "driver": ", ".join(
            ["coordinates"] + ["learns"] * (settings.num_learners == 0) + ["generates"] * (settings.num_runners == 0)
        ),
        "runner": count_noun(engines, "vLLM engine") if settings.backend == "vllm" else "transformers",
        "learner": "learns",
    }
    print(f"{'process':<16}{'CPUs':>5}{'GPUs':>6}  estimated memory of each (GB)")
    for kind in kinds:
        custom = "".join(f", {amount:g} {name}" for name, amount in kind.custom.items())
        sizes = " + ".join(_size(need, kind) for need in needs[kind.name])
        print(
            f"{count_noun(kind.count, kind.name):<16}{kind.cpus:>5g}{kind.gpus:>6g}"
            f"  {sizes} ({work[kind.name]}{custom})"
        )
        for need in needs[kind.name]:
            parts = ", ".join(f"{name} {size / GB:.2f}" for name, size in need.parts.items() if size >= 5e6)
            print(f"{'':<29}{parts}")


def _size(need: Memory, kind: Process) -> str:
    if need.device == "cpu":
        return f"{need.total / GB:.1f}"
    device = f"each of {kind.gpus:g} GPUs" if kind.gpus > 1 else "a GPU"
    return f"{need.total / GB:.1f} of {device}, {need.host / GB:.1f} of CPU memory"


def _this_machine(settings: Settings) -> Node:
    """Returns this machine; `cory train` lets Ray assign as many CPUs as the run requires."""
    import psutil
    import torch

    from policies.settings.processes import cpus, processes

    gpus, available, required = torch.cuda.device_count(), os.cpu_count() or 1, cpus(processes(settings))
    note = f", shared by processes that require {required}" if required > available else ""
    memory = float(psutil.virtual_memory().total)
    gpu_bytes = float(torch.cuda.get_device_properties(0).total_memory) if gpus else None
    name, num_cpus = f"this machine ({available} CPUs{note})", float(max(available, required))
    return Node(name, num_cpus, [1.0] * gpus, {}, memory, gpu_bytes)


def _cluster_nodes() -> list[Node]:
    """Returns the live nodes of the cluster of RAY_ADDRESS, with all their resources.

    Raises:
        CommandError: the cluster is unreachable.
    """
    import ray

    from launch.cluster.session import init_ray

    if ray.is_initialized():
        return alive_nodes()
    init_ray(log_to_driver=False, logging_level="ERROR", configure_logging=False)
    try:
        return alive_nodes()
    finally:
        ray.shutdown()
