"""Checks before a run on this machine that its processes fit into memory."""

from __future__ import annotations

import os

from cory_env.home import IN_JOB
from launch.cluster.machines import this_machine
from launch.cluster.placement import GB
from launch.cluster.session import UNCHECKED
from launch.console.errors import CommandError
from policies.settings.hardware.fit import estimate_processes
from policies.settings.memory import model_shapes
from policies.settings.processes import processes
from policies.settings.settings import Settings


def check_run_memory(settings: Settings) -> None:
    """Checks that a run's processes fit into this machine's memory; a run on a cluster is not checked.

    The estimate is about what learners need. Its allowance and shares of a GPU do not count.
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
        if available is not None and needed > available:
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
