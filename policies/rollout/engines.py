"""Creating the generation backend that the settings choose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from policies.generation.generator import Generator
from policies.settings.settings import Settings


def make_generator(
    s: Settings, models: Mapping[str, str], backend: str, device: torch.device, max_sequences: int, **vllm_options: Any
) -> Generator:
    """Starts a generation backend with the initial weights of models.

    Args:
        backend: `transformers` or `vllm`.
        max_sequences: maximum number of responses that a vLLM engine generates at once.
        **vllm_options: further arguments of `VLLMGenerator`.
    """
    common_arguments: dict[str, Any] = {
        "dtype": s.dtype,
        "device": device,
        "trust_remote_code": s.trust_remote_code,
        "lora": s.lora,
        "frozen": s.frozen_models,
    }
    if backend == "vllm":
        from policies.generation.vllm_generator import VLLMGenerator

        return VLLMGenerator(
            models,
            **common_arguments,
            max_prompt_tokens=s.prompt_limit,
            max_response_tokens=s.max_response_tokens,
            max_sequences=max_sequences,
            tensor_parallel_size=s.tensor_parallel_size,
            **vllm_options,
        )
    from policies.generation.transformers_generator import TransformersGenerator

    return TransformersGenerator(models, **common_arguments, quantization=s.quantization, max_length=s.max_length)
