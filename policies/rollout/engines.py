"""Creating the generation backend that the settings choose."""

from __future__ import annotations

from typing import Any

import torch

from policies.generation.generator import Generator
from policies.settings.settings import Settings


def make_generator(s: Settings, device: torch.device, in_driver: bool) -> Generator:
    """Starts the generation backend of a runner.

    Args:
        s: settings of the run.
        device: the device that Ray assigned to the runner.
        in_driver: whether the runner shares the driver's process with a learner. On a GPU, its engines then run in
            processes of their own.

    Raises:
        DeviceError: vLLM cannot compute on the device.
        EngineStartError: vLLM failed to start.
    """
    common_arguments: dict[str, Any] = {
        "dtype": s.dtype,
        "device": device,
        "trust_remote_code": s.trust_remote_code,
        "lora": s.lora,
        "frozen": s.frozen_models,
    }
    if s.backend == "vllm":
        from policies.generation.vllm_generator import VLLMGenerator

        return VLLMGenerator(
            s.model_paths,
            **common_arguments,
            max_prompt_tokens=s.prompt_limit,
            max_response_tokens=s.max_response_tokens,
            max_sequences=min(s.chains, 256),
            seed=s.seed,
            gpu_share=s.gpus_per_runner,
            tensor_parallel_size=s.tensor_parallel_size,
            in_process=not in_driver or device.type == "cpu",
            timeout=s.generation_timeout,
            weight_transfer=s.weight_transfer,
        )
    from policies.generation.transformers_generator import TransformersGenerator

    return TransformersGenerator(
        s.model_paths, **common_arguments, quantization=s.quantization, max_length=s.max_length
    )
