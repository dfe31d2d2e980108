"""Device checks, memory estimates and error messages of vLLM engines."""

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
"""The part of a runner's GPU share that its engines may use together."""
_MAX_ERROR_CHARACTERS = 300
"""Longest excerpt of vLLM's own error message."""
_CACHE_SHARE = 0.75
"""The part of an engine's memory for weights and KV cache. The rest is for activations and CUDA graphs."""
_MAX_GRAPH_SEQUENCES = 1024
"""Largest batch for which an engine captures a CUDA graph; each graph takes time and memory. vLLM's default is 512."""


class EngineStartError(RuntimeError):
    """A generation engine cannot start."""


def check_device(device: torch.device, dtype: str, lora: Lora | None) -> None:
    """Checks that vLLM can generate on a device.

    Args:
        dtype: the setting: `auto`, `bf16` or `fp32`.
        lora: configuration of the adapters; None if there are none.
    """
    check_vllm_build(device.type)
    if lora is None or device.type == "cpu" or compute_dtype(dtype, device) == torch.bfloat16:
        return
    reason = "" if dtype == "fp32" else f" (dtype={dtype} on a GPU without bf16)"
    fix = "Set dtype=bf16, or backend=transformers." if dtype == "fp32" else "Set backend=transformers."
    raise DeviceError(
        f"weights=lora conflicts with dtype=fp32{reason}: on a GPU, vLLM 0.32 computes adapters in 16 bits only. {fix}"
    )


def cpu_arguments(tensor_parallel_size: int) -> dict[str, Any]:
    """Sets the environment variables of CPU engines, and returns arguments for `vllm.LLM`.

    Args:
        tensor_parallel_size: number of processes that each engine's model is split over.
    """
    # Even in eager mode, vLLM compiles a small helper of its sampler at every start.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if tensor_parallel_size > 1:  # each worker would start as many threads as this process may
        os.environ["OMP_NUM_THREADS"] = str(max(torch.get_num_threads() // tensor_parallel_size, 1))
    # For a chunked prompt, vLLM 0.32 rewinds the request's random generator, which CPU generators do not support.
    return {"enforce_eager": True, "enable_chunked_prefill": False}


def cuda_arguments(max_sequences: int) -> dict[str, Any]:
    """Returns arguments for `vllm.LLM` of engines on GPUs.

    Steps in which every response gets a token replay CUDA graphs, but nothing is compiled: on an H200, an engine of a
    0.36B model then starts in 4 s instead of 63 s (32 s with vLLM's cache), and generates faster (docs/lab/gpu.md).
    """
    largest = min(-(-max_sequences // 16) * 16, _MAX_GRAPH_SEQUENCES)  # vLLM captures multiples of 16
    return {
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "max_cudagraph_capture_size": largest,
        }
    }


def cache_fits(path: str, trust_remote_code: bool, cache: int, weight_bytes: float, share: float) -> bool:
    """Returns whether a KV cache of a fixed size fits an engine's share of a GPU.

    If not, vLLM must measure the free memory, which takes longer, and then fills the whole share.

    Args:
        cache: bytes of the KV cache on each GPU.
        weight_bytes: bytes per weight on each GPU.
    """
    from vllm.platforms import current_platform

    model = meta_model(path, trust_remote_code)
    weights = weight_bytes * sum(parameter.numel() for parameter in model.parameters())
    return weights + cache <= _CACHE_SHARE * share * current_platform.get_device_total_memory()


def check_memory(needed: int, max_sequences: int, length: int) -> None:
    """Checks that KV caches fit into the free memory. Otherwise the system would kill the process during the run.

    Args:
        needed: bytes of the KV caches of all engines.
    """
    import psutil  # a dependency of vLLM

    free = psutil.virtual_memory().available
    if needed > free:
        raise EngineStartError(
            f"vLLM needs {needed / 2**30:.1f} GiB for the KV caches of this runner's engines ({max_sequences} "
            f"responses at once, {length} tokens each), but only {free / 2**30:.1f} GiB of memory are free. "
            f"{memory_advice(torch.device('cpu')).capitalize()}."
        )


def memory_advice(device: torch.device) -> str:
    """Returns how to give engines more memory on a device, or make them need less, as a clause."""
    reduce = "lower max_prompt_tokens, max_response_tokens, queries_per_update or num_agents"
    return f"raise gpus_per_runner or tensor_parallel_size, or {reduce}" if device.type == "cuda" else reduce


@contextmanager
def wrap_errors(action: str, error_type: type[Exception], device: torch.device) -> Iterator[None]:
    """Converts errors of vLLM, pydantic and torch to one error type, with advice.

    Args:
        action: what vLLM fails to do, for the message "vLLM could not …".
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except (EngineDeadError, GenerationError, ModelError):
        raise
    except Exception as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_ERROR_CHARACTERS].rstrip(". ")
        advice = f"If it ran out of memory, {memory_advice(device)}; otherwise try backend=transformers."
        raise error_type(f"vLLM could not {action}: {cause}. {advice}") from error
