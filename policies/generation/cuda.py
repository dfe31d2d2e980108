"""Whether this process can compute on a CUDA GPU, and if not, why."""

from __future__ import annotations

import torch


class DeviceError(RuntimeError):
    """A process cannot compute on the device that it was given; the message says why, and what to do."""


def check_cuda(setting: str, value: float) -> None:
    """Checks that PyTorch can compute on a GPU in this process.

    Args:
        setting: the setting that asks for the GPU.
        value: of that setting.

    Raises:
        DeviceError: it cannot: the driver, the GPU or PyTorch's build does not allow it.
    """
    problem = cuda_problem()
    if problem is not None:
        raise DeviceError(
            f"{setting}={value:g} asks for a GPU, but {problem}. Check the driver (`nvidia-smi`) and PyTorch's build "
            "(`make install LOCK=gpu`); a container needs `--gpus all` or a device plugin. To compute on the CPU, set "
            "gpus_per_runner=0 gpus_per_learner=0 backend=transformers."
        )


def cuda_problem() -> str | None:
    """Returns why PyTorch cannot compute on a GPU in this process, as a clause; None if it can."""
    if torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # which driver or build is missing, or that no GPU is visible
        return f"PyTorch says: {str(error).splitlines()[0].rstrip('.')}"
    return "PyTorch finds none"
