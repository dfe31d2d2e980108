"""Whether this process can compute on a CUDA GPU, and if not, why."""

from __future__ import annotations

import re
from pathlib import Path

import torch

OLDEST_DRIVER = {12: 525, 13: 580}
"""The first NVIDIA driver that runs a major version of CUDA (NVIDIA's table of minor version compatibility)."""
LOWEST_CAPABILITY = (7, 5)
"""The compute capability of the oldest GPUs that CUDA 13, and so PyTorch's and vLLM's packages, are built for."""
DRIVER_FILE = Path("/proc/driver/nvidia/version")


class DeviceError(RuntimeError):
    """A process cannot compute on the device that it was given; the message says why, and what to do."""


def check_cuda(setting: str, value: float, *, capability: bool = True) -> None:
    """Checks that PyTorch can compute on a GPU in this process.

    Args:
        setting: the setting that asks for the GPU.
        value: of that setting.
        capability: as of `cuda_problem`.

    Raises:
        DeviceError: it cannot: the driver, the GPU or PyTorch's build does not allow it.
    """
    problem = cuda_problem(capability=capability)
    if problem is None:
        return
    raise DeviceError(
        f"{setting}={value:g} asks for a GPU, but {problem}. To compute on the CPU, set gpus_per_runner=0 "
        "gpus_per_learner=0 backend=transformers."
    )


def cuda_problem(*, capability: bool = True) -> str | None:
    """Returns why PyTorch cannot compute on a GPU in this process, as a clause; None if it can.

    Args:
        capability: look at the GPU itself too, which takes some of its memory for this process.
    """
    if torch.cuda.is_available():
        if capability and torch.cuda.get_device_capability() < LOWEST_CAPABILITY:
            major, minor = torch.cuda.get_device_capability()
            return (
                f"{torch.cuda.get_device_name()} has compute capability {major}.{minor}, and 7.5 is the lowest that "
                f"CUDA {torch.version.cuda} computes on"
            )
        return None
    if torch.version.cuda is None:
        return "PyTorch is installed without CUDA (`make install LOCK=gpu` brings it)"
    driver = driver_version()
    if driver is None:
        return "there is no NVIDIA driver here (a container needs `--gpus all`, or a device plugin, to see one)"
    oldest = OLDEST_DRIVER.get(int(torch.version.cuda.split(".")[0]), 0)
    if int(driver.split(".")[0]) < oldest:
        return f"the NVIDIA driver here is {driver}, and CUDA {torch.version.cuda} needs {oldest} or later"
    return (
        f"the NVIDIA driver {driver} shows this process no GPU (CUDA_VISIBLE_DEVICES hides it, or a container was "
        "started without `--gpus all`)"
    )


def driver_version() -> str | None:
    """Returns the version of the NVIDIA driver, such as `580.65.06`; None if there is none."""
    try:
        text = DRIVER_FILE.read_text()
    except OSError:
        return None
    version = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return version and version[1]
