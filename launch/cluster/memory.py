"""Checks before a run that its processes fit into memory, and finds settings with which they would."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from cory_env.home import IN_JOB
from launch.cluster.machines import this_machine
from launch.cluster.placement import GB, Node, pack
from launch.cluster.session import UNCHECKED
from launch.console.errors import CommandError
from policies.settings.error import SettingsError
from policies.settings.hardware.fit import MICRO_BATCH_TOKENS, estimate_processes
from policies.settings.memory import Memory, ModelShape, model_shapes
from policies.settings.overrides import apply_overrides
from policies.settings.processes import processes
from policies.settings.settings import Settings, make_settings
from policies.settings.yaml12 import to_cli

MAX_OPTIONS = 3
"""Maximum number of alternatives in a suggestion."""


def check_run_memory(settings: Settings) -> str | None:
    """Checks that a run's processes fit into this machine's memory; a run on a cluster is not checked.

    The estimate is about what learners need, plus an allowance. A run is refused if it does not fit even without the
    allowance.

    Returns:
        A warning if the run may not fit; None: it does.

    Raises:
        CommandError: it does not fit; the message says which settings would help.
        ModelError: a model is missing.
    """
    if "RAY_ADDRESS" in os.environ or IN_JOB in os.environ:
        return None
    kinds, machine = processes(settings), this_machine(settings)
    needs = estimate_processes(settings, model_shapes(settings))
    _, shortfalls = pack(kinds, [machine], needs)
    if not shortfalls or pack(kinds, [machine])[1]:  # Ray reports missing GPUs
        return None
    message = f"{'; '.join(map(str, shortfalls))}. {suggest_settings(settings, [machine])}"
    if UNCHECKED in os.environ or not _exceeds(machine, settings, needs):
        return f"The run may need more memory than there is: {message}"
    raise CommandError(
        f"The run does not fit into memory: {message} {UNCHECKED}=1 starts it all the same; `cory plan` shows the "
        "estimate."
    )


def suggest_settings(settings: Settings, machines: Sequence[Node]) -> str:
    """Returns a sentence with the smallest changes of settings with which a run fits into memory.

    Args:
        settings: of a run that does not fit.
        machines: on which the run is placed.
    """
    changes = list(_changes(settings))
    shapes: dict[str, list[ModelShape]] = {}
    least: tuple[float, str] | None = None
    for size in range(1, len(changes) + 1):
        options = []
        for combination in combinations(changes, size):
            update = {name: value for change in combination for name, value in change.items()}
            for tokens in MICRO_BATCH_TOKENS if "micro_batch_tokens" in update else (None,):
                values = {**update, "micro_batch_tokens": tokens} if tokens else update
                try:
                    changed = make_settings(apply_overrides(settings.model_dump(), values))
                except SettingsError:
                    break
                if changed.weights not in shapes:
                    shapes[changed.weights] = model_shapes(changed)
                needs = estimate_processes(changed, shapes[changed.weights])
                text = " ".join(f"{name}={to_cli(value)}" for name, value in values.items())
                if not pack(processes(changed), machines, needs)[1]:
                    options.append(text)
                    break
                largest = max(sum(need.total for need in parts) for parts in needs.values())
                least = min(least or (largest, text), (largest, text))
        if options:
            return f"It would fit with {', or with '.join(options[:MAX_OPTIONS])}."
    if least is None:
        return "No setting reduces its memory. Use a smaller model, or a machine with more memory."
    return (
        f"It would not even fit with {least[1]}, with which its largest process needs {least[0] / GB:.1f} GB. Use a "
        "smaller model, or a machine with more memory."
    )


def _changes(settings: Settings) -> Iterator[Mapping[str, Any]]:
    """Yields changes that save memory, those with the smallest effects first."""
    yield {"micro_batch_tokens": None}
    if not settings.gradient_checkpointing:
        yield {"gradient_checkpointing": True}
    if settings.weights == "full":
        yield {"weights": "lora"}
    if settings.quantization == "none" and settings.gpus_per_learner and settings.gpus_per_runner:
        yield {"quantization": "nf4", **({} if settings.backend == "transformers" else {"backend": "transformers"})}


def _exceeds(machine: Node, settings: Settings, needs: Mapping[str, Sequence[Memory]]) -> bool:
    """Whether processes need more than a machine's RAM or GPU has, without allowances and shares of a GPU."""
    ram = 0.0
    for kind in processes(settings):
        gpu = 0.0
        for need in needs[kind.name]:
            size = need.total - need.parts.get("allowance", 0.0)
            ram += kind.count * (need.host + (size if need.device == "cpu" else 0.0))
            gpu += size if need.device != "cpu" else 0.0
        if machine.gpu_memory is not None and gpu > machine.gpu_memory:
            return True
    return ram > machine.memory
