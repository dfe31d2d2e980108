"""Whether the packages and the driver of this machine can compute where a run's settings say."""

import os
import sys

from policies.generation.installed import check_vllm_build
from policies.settings.gpus import CLUSTER_VARIABLES, GPU_SETTINGS
from policies.settings.settings import Settings


def check_gpus(settings: Settings) -> None:
    """Checks the devices of a run before anything is started, if it is to run on this machine.

    On a cluster, each process checks its own device when it starts.

    Raises:
        DeviceError: PyTorch cannot use a GPU that is asked for, or vLLM cannot generate on the device that it gets.
    """
    if any(name in os.environ for name in CLUSTER_VARIABLES) or _joined():
        return
    for name in GPU_SETTINGS:
        if value := getattr(settings, name):
            from policies.generation.cuda import check_cuda  # brings torch along

            check_cuda(name, value)
    if settings.backend == "vllm":
        check_vllm_build("cuda" if settings.gpus_per_runner else "cpu")


def _joined() -> bool:
    """Tells whether this process has joined a Ray cluster, which may be one of other machines."""
    if "ray" not in sys.modules:
        return False
    import ray

    return bool(ray.is_initialized())
