"""Which GPU a run computes on if its settings do not say."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from policies.generation.installed import vllm_build, vllm_installed

GPU_SETTINGS = ("gpus_per_runner", "gpus_per_learner")
CLUSTER_VARIABLES = ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR")
"""One of them is set where a run joins a cluster, or is a job on one."""
PRECISION = 10_000
"""Ray counts ten-thousandths of a GPU."""


_elsewhere: ContextVar[bool] = ContextVar("elsewhere", default=False)


@contextmanager
def run_elsewhere() -> Iterator[None]:
    """Chooses no GPU of this machine in settings that are made meanwhile, for a run that it sends to a cluster."""
    token = _elsewhere.set(True)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def choose_gpus(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fills in the GPUs of runners and learners that are not given.

    If neither is given, the learner gets half of one GPU of this machine, and the runners share the other half. If
    there is no GPU, or one of the two is given, what is not given is 0.

    Args:
        values: setting name → value, not validated yet; those left out have their defaults.

    Returns:
        The same, with a number for each setting of `GPU_SETTINGS` that was missing or None.
    """
    given = {name: values[name] for name in GPU_SETTINGS if values.get(name) is not None}
    chosen = dict.fromkeys(GPU_SETTINGS, 0.0)
    if not given and _can_share(values) and has_gpu():
        runners = values.get("num_runners")
        share = PRECISION // 2 // runners / PRECISION if isinstance(runners, int) and runners > 1 else 0.5
        chosen = {"gpus_per_runner": share, "gpus_per_learner": 0.5}
    return {**values, **chosen, **given}


def _can_share(values: Mapping[str, Any]) -> bool:
    """Tells whether a run's processes, and the packages here, can share one GPU."""
    backend = values.get("backend") or ("vllm" if vllm_installed() else "transformers")
    return (
        values.get("num_learners") in (None, 0)  # processes that are asked for are given what they are to have
        and values.get("shards_per_policy") in (None, 1)
        and values.get("tensor_parallel_size") in (None, 1)
        and not (backend == "vllm" and vllm_build() == "cpu")
    )


def has_gpu() -> bool:
    """Tells whether processes that are started here can compute on a GPU of this machine.

    What the nodes of a cluster have is not known before the run is there: this is False then.
    """
    if any(name in os.environ for name in CLUSTER_VARIABLES) or _elsewhere.get():
        return False
    if "ray" in sys.modules:
        import ray

        if ray.is_initialized() and ray.get_runtime_context().get_actor_id():
            return bool(ray.get_gpu_ids())  # a trial of Tune has what its search asked for
    # Importing torch takes seconds. Under Windows, Linux has GPUs as /dev/dxg.
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        return False
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # which torch reads when it is imported
    import torch

    return torch.cuda.is_available()
