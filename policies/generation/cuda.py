"""Whether this process can compute on a CUDA GPU, and if not, why."""

from __future__ import annotations

import torch

LOWEST_CAPABILITY = (7, 5)
"""The compute capability of the oldest GPUs that CUDA 13, and so PyTorch's and vLLM's packages, are built for."""


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
        f"{setting}={value:g} asks for a GPU, but {problem}. Check the driver (`nvidia-smi`) and PyTorch's build "
        "(`make install LOCK=gpu`); a container needs `--gpus all` or a device plugin. To compute on the CPU, set "
        "gpus_per_runner=0 gpus_per_learner=0 backend=transformers."
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
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # which driver or build is missing, or that no GPU is visible
        return f"PyTorch says: {str(error).splitlines()[0].rstrip('.')}"
    return "PyTorch finds none"
