"""Chooses settings with which a run's processes fit into memory, by the estimates of `memory.py`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from policies.settings import memory
from policies.settings.gpus import CLUSTER_VARIABLES
from policies.settings.hardware import devices
from policies.settings.memory import Memory, ModelShape
from policies.settings.settings import Settings

MICRO_BATCH_TOKENS = (16384, 8192, 4096, 2048, 1024, 512)
"""Values that `micro_batch_tokens=auto` may have."""
RAM_SHARE = 0.8
"""Share of the RAM that `micro_batch_tokens=auto` may use; the rest is for the system and other programs."""
MAX_CPU_TOKENS = 2048
"""Largest value on a CPU, where larger micro-batches take memory but save no time."""
ELSEWHERE_TOKENS = 4096
"""Tokens per micro-batch of learners on machines that are unknown before the run starts."""


def fit_micro_batch_tokens(
    settings: Settings, available_bytes: float, models: Sequence[ModelShape] | None = None
) -> int | None:
    """Returns the largest number of tokens per micro-batch with which one learner fits into memory.

    `micro_batch_size` still limits the rows of a micro-batch.

    Args:
        settings: The run's; their `micro_batch_tokens` does not count.
        available_bytes: Memory that one learner may use on its device (`learner_bytes`).
        models: From `model_shapes`, if they are known.

    Returns:
        A power of two from 512 to 16384, or None if a learner does not fit even with 512.
    """
    models = memory.model_shapes(settings) if models is None else models
    for tokens in MICRO_BATCH_TOKENS:
        limited = settings.model_copy(update={"micro_batch_tokens": tokens})
        if memory.estimate_learner(limited, models).total <= available_bytes:
            return tokens
    return None


def choose_micro_batch_tokens(settings: Settings, ram: float | None = None, gpu: float | None = None) -> int:
    """Returns the value of `micro_batch_tokens=auto`.

    Args:
        ram, gpu: Bytes of the machine and of each GPU; if neither is given, of this machine.

    Returns:
        That of `fit_micro_batch_tokens`; the smallest if none fits, as the check before a run says what would; and
        `ELSEWHERE_TOKENS` if the learners' devices are not this machine's.
    """
    models = memory.model_shapes(settings)
    available = learner_bytes(settings, models, ram, gpu)
    if available is None:
        return ELSEWHERE_TOKENS
    tokens = fit_micro_batch_tokens(settings, available, models) or MICRO_BATCH_TOKENS[-1]
    return tokens if settings.gpus_per_learner else min(tokens, MAX_CPU_TOKENS)


def learner_bytes(
    settings: Settings, models: Sequence[ModelShape], ram: float | None = None, gpu: float | None = None
) -> float | None:
    """Returns the bytes that one learner may use on its device.

    On a GPU, this is its share, `gpus_per_learner`. In RAM, the other processes take what they are estimated to need,
    and learners share the rest.

    Args:
        models: From `model_shapes`.
        ram, gpu: Bytes of the machine and of each GPU; if neither is given, of this machine.

    Returns:
        The bytes; None if the device does not exist, or is on another machine, which is unknown.
    """
    if ram is None and gpu is None:
        if settings.num_learners and any(name in os.environ for name in CLUSTER_VARIABLES):
            return None
        ram, gpu = devices.ram_bytes(), devices.gpu_bytes() if settings.gpus_per_learner else None
    if settings.gpus_per_learner:
        return None if gpu is None else gpu * min(settings.gpus_per_learner, 1.0)
    assert ram is not None, "a machine without RAM"
    learners = max(settings.num_learners, 1)
    return (RAM_SHARE * ram - _ram_beside_learners(settings, models)) / learners


def estimate_processes(settings: Settings, models: Sequence[ModelShape]) -> dict[str, list[Memory]]:
    """Returns kind of process → its memory; a driver may have several parts.

    Args:
        models: From `model_shapes`.
    """
    learner, runner = memory.estimate_learner(settings, models), memory.estimate_runner(settings, models)
    driver = Memory("cpu", {"libraries": memory.LIBRARIES["learner"]}, 0.0)
    needs = {"runner": [runner], "learner": [learner], "driver": [driver if settings.num_learners else learner]}
    if settings.num_runners == 0:
        needs["driver"].append(runner)
    return needs


def _ram_beside_learners(settings: Settings, models: Sequence[ModelShape]) -> float:
    """Bytes of RAM that runners, and a driver that does not learn, need."""
    runner = memory.estimate_runner(settings, models)
    runner_ram = runner.host + (runner.total if runner.device == "cpu" else 0.0)
    driver = memory.LIBRARIES["learner"] if settings.num_learners else 0.0
    return driver + max(settings.num_runners, 1) * runner_ram
