"""Chooses `micro_batch_tokens` such that a learner fits into memory, by the estimate of `memory.py`."""

from __future__ import annotations

import os

from policies.settings.gpus import CLUSTER_VARIABLES
from policies.settings.hardware import devices
from policies.settings.memory import estimate_learner, model_shapes
from policies.settings.settings import Settings

MICRO_BATCH_TOKENS = (16384, 8192, 4096, 2048, 1024, 512)
"""Values that `micro_batch_tokens=auto` may have."""
RAM_SHARE = 0.5
"""Share of the RAM for learners; the rest is for runners, the driver and the system."""
MAX_CPU_TOKENS = 2048
"""Largest value on a CPU, where larger micro-batches take memory but save no time."""
ELSEWHERE_TOKENS = 4096
"""Tokens per micro-batch of learners on machines that are unknown before the run starts."""


def choose_micro_batch_tokens(settings: Settings, ram: float | None = None, gpu: float | None = None) -> int:
    """Returns the value of `micro_batch_tokens=auto`: the largest with which a learner fits into its device.

    Args:
        ram, gpu: Bytes of the machine and of each GPU; if neither is given, of this machine.

    Returns:
        The smallest value if none fits, as the check before a run says what would; and `ELSEWHERE_TOKENS` if the
        learners' devices are not this machine's.
    """
    if ram is None and gpu is None:
        if settings.num_learners and any(name in os.environ for name in CLUSTER_VARIABLES):
            return ELSEWHERE_TOKENS
        ram, gpu = devices.ram_bytes(), devices.gpu_bytes() if settings.gpus_per_learner else None
    if settings.gpus_per_learner:
        if gpu is None:
            return ELSEWHERE_TOKENS
        available, choices = gpu * min(settings.gpus_per_learner, 1.0), [*MICRO_BATCH_TOKENS]
    else:
        assert ram is not None, "a machine without RAM"
        available = RAM_SHARE * ram / max(settings.num_learners, 1)
        choices = [tokens for tokens in MICRO_BATCH_TOKENS if tokens <= MAX_CPU_TOKENS]
    models = model_shapes(settings)
    for tokens in choices:
        limited = settings.model_copy(update={"micro_batch_tokens": tokens})
        if estimate_learner(limited, models).total <= available:
            return tokens
    return choices[-1]
