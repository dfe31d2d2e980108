"""What generates with a run's trained policies, in this process: each is loaded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from launch.console.errors import CommandError
from launch.models.trained import Trained
from policies.generation.installed import vllm_build, vllm_installed
from policies.generation.transformers_generator import TransformersGenerator
from policies.models.adapters import adapted
from policies.models.language_model import empty_language_model
from policies.models.model_names import model_path
from policies.settings.settings import Settings

if TYPE_CHECKING:
    from policies.generation.vllm_generator import VLLMGenerator


def choose_backend(asked: str | None, settings: Settings) -> str:
    """Returns what generates with a run's policies: `vllm` or `transformers`, or what was asked for.

    Raises:
        CommandError: vLLM was asked for, but cannot.
    """
    quantised = settings.quantization != "none"
    if asked == "vllm" and not vllm_installed():
        raise CommandError(
            "vLLM is not installed. Run `pip install 'cory-rllib[vllm]'`, or use --backend transformers."
        )
    if asked == "vllm" and quantised:
        raise CommandError("vLLM does not load a base that is quantised as in training. Use --backend transformers.")
    return asked or ("vllm" if vllm_installed() and not quantised else "transformers")


def transformers_generator(trained: Trained, policies: Sequence[str]) -> TransformersGenerator:
    """Loads policies for `transformers`.

    Args:
        trained: whose they are.
        policies: their names, each once.

    Raises:
        CommandError: the checkpoint or the base model is not as it was.
        ModelError: there is no base model any more.
    """
    settings = trained.settings
    generator = TransformersGenerator(
        _models(trained, policies),
        **_common(trained),
        quantization=settings.quantization,
        longest=settings.max_prompt + settings.max_response,
    )
    for policy in policies:
        weights = trained.weights(policy)
        trained.check_base(policy, weights, generator.own[policy])
        generator.load(policy, weights, trained.update)
    return generator


def vllm_generator(trained: Trained, policies: Sequence[str], at_once: int) -> VLLMGenerator:
    """Starts vLLM's engines and gives them their weights.

    Args:
        trained: whose the policies are.
        policies: their names, each once.
        at_once: responses that an engine writes at the same time, at most.

    Raises:
        CommandError: the checkpoint or the base model is not as it was, or vLLM has no place for all weights.
        EngineStartError: vLLM could not start.
        ModelError: there is no base model any more.
    """
    from policies.generation.vllm_generator import VLLMGenerator

    settings, models = trained.settings, _models(trained, policies)
    found = {policy: trained.weights(policy) for policy in policies}
    for policy, path in models.items():  # before engines start, which takes long
        model = empty_language_model(path, settings.trust_remote_code)
        if settings.lora is not None:
            model = adapted(model.requires_grad_(False), settings.lora)
        own = {name: each for name, each in model.named_parameters() if settings.lora is None or each.requires_grad}
        trained.check_base(policy, found[policy], own)
    common = _common(trained)
    if vllm_build() == "cpu":  # whatever PyTorch has
        common["device"] = torch.device("cpu")
    generator = VLLMGenerator(
        models,
        **common,
        max_prompt=settings.max_prompt,
        max_response=settings.max_response,
        max_sequences=at_once,
        tensor_parallel=settings.tensor_parallel,
    )
    for policy, weights in found.items():
        if stale := generator.load(policy, weights, trained.update).stale:
            raise CommandError(
                f"vLLM has no place for some weights of {policy}, such as {stale[0]}. Use --backend transformers."
            )
    return generator


def _models(trained: Trained, policies: Sequence[str]) -> dict[str, str]:
    return {policy: model_path(trained.base(policy)) for policy in policies}


def _common(trained: Trained) -> dict[str, Any]:
    settings = trained.settings
    return {
        "dtype": settings.dtype,
        "device": torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        "trust_remote_code": settings.trust_remote_code,
        "lora": settings.lora,
    }
