"""Default GPU assignment if the settings do not specify one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from cory_env.home import IN_JOB
from policies.generation.installed import vllm_build, vllm_installed

GPU_SETTINGS = ("gpus_per_runner", "gpus_per_learner")
CLUSTER_VARIABLES = ("RAY_ADDRESS", IN_JOB)
"""One of them is set if a run joins a cluster or is a job on one."""
PRECISION = 10_000
"""Ray's resolution: ten-thousandths of a GPU."""


_other_machine_gpu: ContextVar[bool | None] = ContextVar("other_machine_gpu", default=None)
"""Whether the other machine for which settings are made has a GPU; None: settings are for this machine."""


@contextmanager
def other_machine(gpu: bool) -> Iterator[None]:
    """Within this context, settings are for a run on another machine, whose vLLM supports its devices.

    Args:
        gpu: whether the machine has a GPU; False for a cluster, whose nodes are unknown.
    """
    token = _other_machine_gpu.set(gpu)
    try:
        yield
    finally:
        _other_machine_gpu.reset(token)


def choose_gpus(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fills in `gpus_per_runner` and `gpus_per_learner` if they are not set.

    If neither is set, the learner gets half of one GPU of this machine, and the runners share the other half. If there
    is no GPU, or only one of them is set, the missing value is 0.

    Args:
        values: setting name → value, not validated yet; missing settings have their defaults.

    Returns:
        `values` with a number for each of `GPU_SETTINGS`.
    """
    explicit = {name: values[name] for name in GPU_SETTINGS if values.get(name) is not None}
    defaults = dict.fromkeys(GPU_SETTINGS, 0.0)
    if not explicit and _can_share(values) and has_gpu():
        runners = values.get("num_runners")
        share = PRECISION // 2 // runners / PRECISION if isinstance(runners, int) and runners > 1 else 0.5
        defaults = {"gpus_per_runner": share, "gpus_per_learner": 0.5}
    return {**values, **defaults, **explicit}


def _can_share(values: Mapping[str, Any]) -> bool:
    """Whether the run's processes, with the installed packages, can share one GPU."""
    backend = values.get("backend") or ("vllm" if vllm_installed() else "transformers")
    return (
        values.get("num_learners") in (None, 0)  # with explicit learners, GPUs must be set explicitly too
        and values.get("shards_per_policy") in (None, 1)
        and values.get("tensor_parallel_size") in (None, 1)
        and not (backend == "vllm" and _other_machine_gpu.get() is None and vllm_build() == "cpu")
    )


def has_gpu() -> bool:
    """Whether processes of a run can use a GPU: of this machine, or of the `other_machine`.

    False for a run on a cluster, whose nodes are unknown before it starts.
    """
    if (other := _other_machine_gpu.get()) is not None:
        return other
    if any(name in os.environ for name in CLUSTER_VARIABLES):
        return False
    if "ray" in sys.modules:
        import ray

        if ray.is_initialized() and ray.get_runtime_context().get_actor_id():
            return bool(ray.get_gpu_ids())  # a trial of Tune has the GPUs that its search requested
    # Importing torch takes seconds. Under Windows, Linux has GPUs as /dev/dxg.
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        return False
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read by torch on import
    import torch

    return torch.cuda.is_available()
