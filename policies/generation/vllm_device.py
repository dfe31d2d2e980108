"""What a vLLM engine needs of the device that it runs on, and what helps when it fails there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from policies.generation.cuda import DeviceError
from policies.generation.generator import GenerationError
from policies.generation.installed import check_vllm_build
from policies.models.language_model import compute_dtype, meta_model
from policies.models.lora import Lora
from policies.models.model_check import ModelError

GPU_SHARE = 0.9
"""The part of its share of a GPU that a runner's engines may take together."""
_LONGEST = 300  # characters of what vLLM says
_CACHE_SHARE = 0.75
"""The part of an engine's memory that weights and KV cache may fill: the rest is for activations and CUDA graphs."""


def check_device(device: torch.device, dtype: str, lora: Lora | None) -> None:
    """Checks that vLLM can generate on a device.

    Args:
        device: where engines are to run.
        dtype: the setting: `auto`, `bf16` or `fp32`.
        lora: what the adapters are like; None: there are none.

    Raises:
        DeviceError: the installed build cannot use that device, or has no kernels for adapters of that type there.
    """
    check_vllm_build(device.type)
    if lora is None or device.type == "cpu" or compute_dtype(dtype, device) == torch.bfloat16:
        return
    here = "dtype=fp32" if dtype == "fp32" else f"dtype={dtype} is fp32 on this GPU, which has no bf16"
    fix = "Set dtype=bf16, or backend=transformers." if dtype == "fp32" else "Set backend=transformers."
    raise DeviceError(f"weights=lora, and {here}: on a GPU, vLLM 0.32 computes adapters in 16 bits only. {fix}")


def cpu_arguments(tensor_parallel_size: int) -> dict[str, Any]:
    """Sets what engines on a CPU read from the environment, and returns what `vllm.LLM` is told.

    Args:
        tensor_parallel_size: processes that each engine's model is split over.
    """
    # vLLM compiles a helper of its sampler even in eager mode, at every start, for a sum.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if tensor_parallel_size > 1:  # each worker would start as many threads as this process may
        os.environ["OMP_NUM_THREADS"] = str(max(torch.get_num_threads() // tensor_parallel_size, 1))
    # A prompt that is cut into chunks makes vLLM 0.32 rewind its request's seed, which CPU generators cannot.
    return {"enforce_eager": True, "enable_chunked_prefill": False}


def cache_fits(path: str, trust_remote_code: bool, cache: int, weight_bytes: float, share: float) -> bool:
    """Tells whether a KV cache of a fixed size fits an engine's share of a GPU. If not, vLLM has to measure how much of
    it is left for a cache, which takes longer, and fills the share whatever is needed.

    Args:
        path: the model.
        trust_remote_code: run code that comes with it.
        cache: bytes of the KV cache, on each GPU.
        weight_bytes: bytes that one weight takes on each GPU.
        share: the engine's part of each GPU.
    """
    from vllm.platforms import current_platform

    model = meta_model(path, trust_remote_code)
    weights = weight_bytes * sum(parameter.numel() for parameter in model.parameters())
    return weights + cache <= _CACHE_SHARE * share * current_platform.get_device_total_memory()


def memory_advice(device: torch.device) -> str:
    """Returns the settings that give engines more memory on a device, or have them need less."""
    less = "lower max_prompt_tokens, max_response_tokens, queries or num_agents"
    return f"raise gpus_per_runner or tensor_parallel_size, or {less}" if device.type == "cuda" else less


@contextmanager
def explained(what: str, kind: type[Exception], device: torch.device) -> Iterator[None]:
    """Raises what vLLM raises meanwhile, of its own kinds, pydantic's or torch's, as an error of one kind.

    Args:
        what: vLLM could not do then, as a clause.
        kind: of the error.
        device: where the engine is.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except (EngineDeadError, GenerationError, ModelError):
        raise
    except Exception as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST].rstrip(". ")
        advice = f"If memory is short, {memory_advice(device)}; if not, backend=transformers may do."
        raise kind(f"vLLM could not {what}: {cause}. {advice}") from error
