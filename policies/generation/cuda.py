"""Checks that this process can use a CUDA GPU."""

from __future__ import annotations

import torch


class DeviceError(RuntimeError):
    """A process cannot use the device that it was assigned."""


def check_cuda(setting: str, value: float) -> None:
    """Checks that PyTorch can use a GPU in this process."""
    problem = cuda_problem()
    if problem is not None:
        raise DeviceError(
            f"{setting}={value:g} requires a GPU, but {problem}. Check the driver (`nvidia-smi`) and PyTorch's build "
            "(`make install LOCK=gpu`); a container needs `--gpus all` or a device plugin. To compute on the CPU, set "
            "gpus_per_runner=0 gpus_per_learner=0 backend=transformers."
        )


def cuda_problem() -> str | None:
    """Returns why PyTorch cannot use a GPU in this process, as a clause; None if it can."""
    if torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # names the missing driver or build, or says that no GPU is visible
        return f"PyTorch reports: {str(error).splitlines()[0].rstrip('.')}"
    return "PyTorch finds none"
