"""The memory of a run's processes, and the check before a run on this machine that they fit."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from cory_env.home import IN_JOB
from launch.cluster.machines import this_machine
from launch.cluster.placement import GB
from launch.cluster.session import UNCHECKED
from launch.console.errors import CommandError
from policies.generation.vllm_generator import BLOCK_TOKENS
from policies.settings.memory import (
    LIBRARIES,
    Memory,
    ModelShape,
    base_bytes,
    bytes_per_number,
    estimate_learner,
    model_shapes,
    with_overhead,
)
from policies.settings.processes import processes
from policies.settings.settings import Settings

LOWEST_SHARE = 0.72
"""The lowest measured peak as a share of its estimate (docs/lab/memory.md): what may fit is not refused."""


def estimate_runner(settings: Settings, models: Sequence[ModelShape]) -> Memory:
    """Estimates the memory of a process that generates, with its reward process.

    A reward's own model is unknown here, so it is not counted.

    Args:
        models: from `model_shapes`.
    """
    device = torch.device("cuda" if settings.gpus_per_runner else "cpu")
    size, split = bytes_per_number(settings, device), settings.tensor_parallel_size
    devices = split if device.type == "cuda" else 1
    trained, frozen = models[: len(settings.models)], models[len(settings.models) :]
    engines = models if settings.lora is None else [*trained[:1], *frozen]
    parts = {"adapters": 4.0 * sum(model.adapter for model in trained)}  # upper bound per device
    concurrent = min(settings.chains, 256)
    libraries = LIBRARIES[settings.backend] + LIBRARIES["reward"]
    if settings.num_runners == 0:
        libraries -= LIBRARIES["learner"]  # counted for the driver already
    if settings.backend == "transformers":
        full = models if settings.lora is None else frozen
        base = 0.0 if settings.lora is None else base_bytes(settings, models[0], device)
        values = max(model.heads * model.head for model in models)
        parts["weights"] = base + 4.0 * sum(model.parameters for model in full)
        parts["KV cache"] = float(concurrent * settings.max_length * values * size)
    else:
        blocks = concurrent * -(-settings.max_length // BLOCK_TOKENS) + 16
        values = sum(max(model.heads // devices, 1) * model.head for model in engines)
        parts["weights"] = float(size) * sum(model.parameters for model in engines) / devices
        parts["KV caches"] = float(blocks * BLOCK_TOKENS * size * values)
        libraries += len(engines) * (split + 1) * LIBRARIES["vllm"] if split > 1 else 0.0
    return with_overhead(parts, device, libraries)


def estimate_processes(settings: Settings, models: Sequence[ModelShape]) -> dict[str, list[Memory]]:
    """Returns kind of process → its memory; a driver may have several parts.

    Args:
        models: from `model_shapes`.
    """
    learner, runner = estimate_learner(settings, models), estimate_runner(settings, models)
    driver = Memory("cpu", {"libraries": LIBRARIES["learner"]}, 0.0)
    needs = {"runner": [runner], "learner": [learner], "driver": [driver if settings.num_learners else learner]}
    if settings.num_runners == 0:
        needs["driver"].append(runner)
    return needs


def check_run_memory(settings: Settings) -> None:
    """Checks that a run's processes fit into this machine's memory; a run on a cluster is not checked.

    The estimate is about what learners need, so a run that may fit starts. Its allowance and shares of a GPU do not
    count.
    """
    if {"RAY_ADDRESS", IN_JOB, UNCHECKED} & os.environ.keys():
        return
    machine, needs = this_machine(settings), estimate_processes(settings, model_shapes(settings))
    ram, gpu = 0.0, 0.0
    for kind in processes(settings):
        on_gpu = 0.0
        for need in needs[kind.name]:
            size = need.total - need.parts.get("allowance", 0.0)
            ram += kind.count * (need.host + (size if need.device == "cpu" else 0.0))
            on_gpu += size if need.device != "cpu" else 0.0
        gpu = max(gpu, on_gpu)
    for name, needed, available in (("memory", ram, machine.memory), ("GPU memory", gpu, machine.gpu_memory)):
        if available is not None and LOWEST_SHARE * needed > available:
            raise CommandError(
                f"The run does not fit into memory: it needs about {needed / GB:.1f} GB of {name}, but there are "
                f"{available / GB:.1f} GB. {saving_settings(settings)} `cory plan` shows the estimate; {UNCHECKED}=1 "
                "starts the run all the same."
            )


def saving_settings(settings: Settings) -> str:
    """Returns a sentence with changes of settings that save memory."""
    changes = ["a smaller micro_batch_tokens"]
    if not settings.gradient_checkpointing:
        changes.append("gradient_checkpointing=true")
    if settings.weights == "full":
        changes.append("weights=lora")
    if settings.quantization == "none" and settings.gpus_per_learner and settings.gpus_per_runner:
        changes.append("quantization=nf4 with backend=transformers")
    return f"Less memory is needed with {', '.join(changes)} or a smaller model."
