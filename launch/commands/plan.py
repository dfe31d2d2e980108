"""`cory plan`: what a run would need, where, and whether the cluster or this machine has it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.cluster.placement import GB, Node, alive_nodes, count_noun, pack
from launch.console.cli import ConfigFiles, Debug, Words

if TYPE_CHECKING:
    from policies.settings.memory import Memory, Shape
    from policies.settings.processes import Process
    from policies.settings.settings import Settings

LACKING = 1
"""Exit code if something is missing."""


def plan(
    words: Words = None,
    config: ConfigFiles = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Plan for N machines alike, as the next options say.")
    ] = None,
    cpus: Annotated[int | None, typer.Option(min=0, metavar="N", help="CPUs of each. [default: 96]")] = None,
    memory: Annotated[float | None, typer.Option(min=0, metavar="GB", help="Memory of each. [default: 1000]")] = None,
    gpus: Annotated[int | None, typer.Option(min=0, metavar="N", help="GPUs of each. [default: 8]")] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(min=0, metavar="GB", help="Memory of each GPU. [default: 80]")
    ] = None,
    debug: Debug = False,
) -> int:
    """Show where a run's processes would go, the memory they need, and whether it is there.

    The cluster is the one that RAY_ADDRESS names, else this machine; with --nodes, or another option for machines, one
    that need not be there. Memory is an estimate (docs/plan.md).

    Exit codes:
      0 the run fits; 1 it does not; 2 a user error.
    """
    from launch.cluster import session
    from launch.cluster.gpus import check_gpus
    from launch.console.configuration import split_words
    from policies.models.model_check import check_folder
    from policies.settings.memory import shapes
    from policies.settings.processes import processes

    settings = split_words(words or (), config or ()).settings()
    options = {"cpus": cpus, "memory": memory, "gpus": gpus, "gpu_memory": gpu_memory}
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    imagined = nodes is not None or bool(given)
    session.quiet_libraries(debug)
    for path in settings.model_paths.values():
        check_folder(path, weights=not imagined)  # machines that need not be there need not have them
    tokenizers = settings.make_tokenizers()
    for policy in settings.policy_ids:
        settings.vocab_size(tokenizers, policy)
    settings.chat_formats(tokenizers)
    models = shapes(settings)
    kinds, needs = processes(settings), estimate(settings, models)
    if imagined:
        machines = make_machines(nodes or 1, **given)
        for node in machines:  # all that is asked for beside, as nobody said which have it
            node.custom.update((name, float("inf")) for kind in kinds for name in kind.custom)
    elif "RAY_ADDRESS" in os.environ:
        machines = _cluster()
    else:
        session.check_driver(settings)
        machines = [_this_machine(settings)]
    _print_processes(settings, kinds, needs)
    print()
    families = settings.families()
    for line in dict.fromkeys(
        f"{name}: {model.parameters / 1e6:,.1f} M parameters, model family {families[policy]}"
        for (policy, name), model in zip(settings.models.items(), models, strict=True)
    ):
        print(line)
    filled, lacking = pack(kinds, machines, needs)
    print()
    for node in filled:
        print(f"{node.name}: {', '.join(node.holds) or 'nothing'}")
    gpu = max((node.gpu_memory or 0.0 for node in machines), default=0.0)
    for lack in lacking:
        why = "; ".join(lack.reasons) or "the cluster has no nodes"
        print(f"Lacking: no room for {lack.left} of {count_noun(lack.kind.count, lack.kind.name)}: {why}.")
    for lack in lacking if gpu else ():
        if sum(need.total for need in needs[lack.kind.name] if need.device == "cuda") > gpu * lack.kind.gpus:
            print(_what_fits(settings, lack.kind.name, gpu))
    if not lacking and not imagined and "RAY_ADDRESS" not in os.environ:
        check_gpus(settings)
    print("It does not fit." if lacking else "It fits.")
    return LACKING if lacking else 0


def make_machines(
    count: int, cpus: int = 96, memory: float = 1000, gpus: int = 8, gpu_memory: float = 80
) -> list[Node]:
    """Returns machines that need not be there; memory in GB."""
    of_gpu = gpu_memory * GB if gpus else None
    return [Node(f"node {n + 1} of {count}", cpus, [1.0] * gpus, {}, memory * GB, of_gpu) for n in range(count)]


def estimate(settings: Settings, models: Sequence[Shape]) -> dict[str, list[Memory]]:
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
        return f"A runner's engines fit on {gpus} with tensor_parallel_size={parts} gpus_per_runner={parts}."
    shards = memory.least_shards(settings, room)
    if shards is None:
        return f"Learners fit on no number of {gpus} up to {memory.SPLITS[-1]} for each LLM."
    count = shards * len(settings.policy_ids)
    return f"Learners fit on {gpus} with shards_per_policy={shards} num_learners={count} gpus_per_learner=1."


def _print_processes(settings: Settings, kinds: Sequence[Process], needs: dict[str, list[Memory]]) -> None:
    engines = 1 if settings.weights == "lora" else len(settings.policy_ids)
    work = {
        "driver": " and ".join(
            ["leads"] + ["learns"] * (settings.num_learners == 0) + ["generates"] * (settings.num_runners == 0)
        ),
        "runner": count_noun(engines, "vLLM engine") if settings.backend == "vllm" else "transformers",
        "learner": "learns",
    }
    print(f"{'process':<16}{'CPUs':>5}{'GPUs':>6}  memory of each, estimated (GB)")
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
    where = f"each of {kind.gpus:g} GPUs" if kind.gpus > 1 else "a GPU"
    return f"{need.total / GB:.1f} of {where}, {need.host / GB:.1f} beside it"


def _this_machine(settings: Settings) -> Node:
    """Returns this machine; `cory train` gives out as many CPUs as are asked for."""
    import psutil
    import torch

    from policies.settings.processes import cpus, processes

    count, own, wanted = torch.cuda.device_count(), os.cpu_count() or 1, cpus(processes(settings))
    shared = f", shared by processes that ask for {wanted}" if wanted > own else ""
    memory = float(psutil.virtual_memory().total)
    of_gpu = float(torch.cuda.get_device_properties(0).total_memory) if count else None
    return Node(f"this machine ({own} CPUs{shared})", float(max(own, wanted)), [1.0] * count, {}, memory, of_gpu)


def _cluster() -> list[Node]:
    """Returns the living nodes of the cluster that RAY_ADDRESS names, with all that they have.

    Raises:
        CommandError: none answers.
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
