"""What generates with trained policies, in this process: each is loaded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from launch.console.errors import CommandError
from launch.models.trained import PolicySet, trainable
from policies.generation.installed import vllm_build, vllm_installed
from policies.generation.transformers_generator import TransformersGenerator
from policies.models.model_names import model_path
from policies.settings.settings import Settings

if TYPE_CHECKING:
    from policies.generation.vllm_generator import VLLMGenerator

MIN_TEMPERATURE = 1e-4
"""The temperature that stands for 0: always the likeliest token, without a division by zero."""


def choose_backend(backend: str | None, settings: Settings) -> str:
    """Returns what generates with a run's policies: `vllm` or `transformers`, or what was asked for.

    Raises:
        CommandError: vLLM was asked for, but cannot.
    """
    quantised = settings.quantization != "none"
    if backend == "vllm" and quantised:
        raise CommandError("vLLM does not load a base that is quantised as in training. Use --backend transformers.")
    if backend == "vllm" and not vllm_installed():
        raise CommandError("vLLM is not installed. Run `pip install 'cory-rllib[vllm]'`.")
    return backend or ("vllm" if vllm_installed() and not quantised else "transformers")


def load_generator(
    trained: PolicySet, policies: Sequence[str], backend: str, at_once: int
) -> TransformersGenerator | VLLMGenerator:
    """Loads policies.

    Args:
        trained: whose they are.
        policies: their names, each once.
        backend: `transformers` or `vllm`.
        at_once: responses that a vLLM engine writes at the same time, at most.

    Raises:
        CommandError: the checkpoint or the base model is not as it was, or vLLM has no place for all weights.
        EngineStartError: vLLM could not start.
        ModelError: there is no base model any more.
    """
    settings = trained.settings
    models = {policy: model_path(trained.base(policy)) for policy in policies}
    weights = {policy: trained.weights(policy) for policy in policies}
    cuda = torch.cuda.is_available() and not (backend == "vllm" and vllm_build() == "cpu")
    common: dict[str, Any] = {
        "dtype": settings.dtype,
        "device": torch.device("cuda" if cuda else "cpu"),
        "trust_remote_code": settings.trust_remote_code,
        "lora": settings.lora,
    }
    if backend == "transformers":
        longest = settings.max_prompt_tokens + settings.max_response_tokens
        hf_generator = TransformersGenerator(models, **common, quantization=settings.quantization, longest=longest)
        for policy in policies:
            trained.check_base(policy, weights[policy], hf_generator.own[policy])
            hf_generator.load(policy, weights[policy], trained.update)
        return hf_generator
    from policies.generation.vllm_generator import VLLMGenerator

    for policy in policies:  # before engines start, which takes long
        trained.check_base(policy, weights[policy], trainable(trained.meta_model(policy)))
    generator = VLLMGenerator(
        models,
        **common,
        max_prompt_tokens=settings.max_prompt_tokens,
        max_response_tokens=settings.max_response_tokens,
        max_sequences=at_once,
        tensor_parallel_size=settings.tensor_parallel_size,
    )
    for policy in policies:
        if stale := generator.load(policy, weights[policy], trained.update).stale:
            raise CommandError(
                f"vLLM has no place for some weights of {policy}, such as {stale[0]}. Use --backend transformers."
            )
    return generator
