"""`cory plan`: the placement and memory of a run's processes, and whether the cluster or this machine has room."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.cluster.placement import GB, count_noun, pack
from launch.console.cli import ConfigFiles, Debug, Words

if TYPE_CHECKING:
    from policies.settings.memory import Memory
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
    for hypothetical machines. Memory is an estimate (docs/gpus.md).

    Exit codes:
      0 the run fits; 1 it does not; 2 a user error.
    """
    from launch.cluster import machines, session
    from launch.cluster.gpus import check_gpus
    from launch.cluster.memory import estimate_processes, saving_settings
    from launch.console.configuration import split_arguments
    from launch.training.preflight import fill_in_settings
    from policies.settings.gpus import other_machine
    from policies.settings.memory import model_shapes
    from policies.settings.processes import processes

    options = {"cpus": cpus, "memory": memory, "gpus": gpus, "gpu_memory": gpu_memory}
    machine: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    hypothetical = nodes is not None or bool(machine)
    session.quiet_libraries(debug)
    arguments = split_arguments(words or (), config or ())
    arguments.check_task()
    if hypothetical:  # on a cluster, GPUs are used only if settings say so
        with other_machine(gpu=nodes in (None, 1) and gpus != 0):
            settings = arguments.settings()
        node = machines.make_machines(1, **machine)[0]
        settings = fill_in_settings(settings, node.memory, node.gpu_memory)
    else:
        settings = fill_in_settings(arguments.settings())
    tokenizers = settings.make_tokenizers()
    for policy_id in settings.policy_ids:
        settings.vocab_size(tokenizers, policy_id)
    settings.chat_formats(tokenizers)
    models = model_shapes(settings)
    kinds, needs = processes(settings), estimate_processes(settings, models)
    if hypothetical:
        available = machines.make_machines(nodes or 1, **machine)
    elif "RAY_ADDRESS" in os.environ:
        available = machines.cluster_nodes()
    else:
        session.check_driver(settings)
        available = [machines.this_machine(settings)]
    _print_processes(settings, kinds, needs)
    print()
    families = settings.families()
    for line in dict.fromkeys(
        f"{name}: {model.parameters / 1e6:,.1f} M parameters, model family {families[policy_id]}"
        for (policy_id, name), model in zip(settings.all_models.items(), models, strict=True)
    ):
        print(line)
    if hypothetical:
        assumed = ", ".join(f"--{name.replace('_', '-')}" for name in options if name not in machine)
        note = f" (assumed: {assumed})" if assumed else ""
        print(f"Each machine: {machines.describe_machine(available[0])}{note}.")
    filled, shortfalls = pack(kinds, available, needs)
    print()
    for node in filled:
        print(f"{node.name}: {', '.join(node.processes) or 'nothing'}")
    for shortfall in shortfalls:
        print(f"Missing: {shortfall}.")
    if shortfalls and not pack(kinds, available)[1]:  # only memory is missing
        print(saving_settings(settings))
    if any(node.gpus for node in available) and not any(kind.gpus for kind in kinds):
        print(
            "No process uses a GPU, as gpus_per_learner and gpus_per_runner are 0, the default on a cluster and with "
            "num_learners. gpus_per_learner=0.5 gpus_per_runner=0.5 share one GPU."
        )
    if not shortfalls and not hypothetical and "RAY_ADDRESS" not in os.environ:
        check_gpus(settings)
    print("It does not fit." if shortfalls else "It fits.")
    return DOES_NOT_FIT if shortfalls else 0


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
        sizes = " + ".join(_size(need, kind) for need in needs[kind.name])
        print(f"{count_noun(kind.count, kind.name):<16}{kind.cpus:>5g}{kind.gpus:>6g}  {sizes} ({work[kind.name]})")
        for need in needs[kind.name]:
            parts = ", ".join(f"{name} {size / GB:.2f}" for name, size in need.parts.items() if size >= 5e6)
            print(f"{'':<29}{parts}")


def _size(need: Memory, kind: Process) -> str:
    if need.device == "cpu":
        return f"{need.total / GB:.1f}"
    device = f"each of {kind.gpus:g} GPUs" if kind.gpus > 1 else "a GPU"
    return f"{need.total / GB:.1f} of {device}, {need.host / GB:.1f} of CPU memory"
