"""Checks that this machine's GPU driver and packages support the devices in a run's settings."""

import os
import sys

from policies.generation.installed import check_vllm_build
from policies.settings.gpus import CLUSTER_VARIABLES, GPU_SETTINGS
from policies.settings.settings import Settings


def check_gpus(settings: Settings) -> None:
    """Checks the devices of a run on this machine before anything starts.

    On a cluster, each process checks its own device when it starts.
    """
    has_joined = "ray" in sys.modules and sys.modules["ray"].is_initialized()  # maybe a cluster on other machines
    if has_joined or any(name in os.environ for name in CLUSTER_VARIABLES):
        return
    for name in GPU_SETTINGS:
        if value := getattr(settings, name):
            from policies.generation.cuda import check_cuda  # imports torch

            check_cuda(name, value)
    if settings.backend == "vllm":
        check_vllm_build("cuda" if settings.gpus_per_runner else "cpu")
