"""Loads trained policies into a generator in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from launch.console.errors import CommandError
from launch.models.trained import PolicySet
from policies.generation.generator import Generator
from policies.generation.installed import vllm_build, vllm_installed
from policies.rollout.engines import make_generator
from policies.settings.settings import Settings


def choose_backend(backend: str | None, settings: Settings) -> str:
    """Returns the generation backend for a run's policies: `vllm` or `transformers`.

    Args:
        backend: the user's choice; None for vLLM if possible.
    """
    is_quantized = settings.quantization != "none"
    if backend == "vllm" and is_quantized:
        raise CommandError(
            f"--backend vllm conflicts with quantization={settings.quantization}: vLLM does not load a base that is "
            "quantized as in training. Use --backend transformers."
        )
    if backend == "vllm" and not vllm_installed():
        raise CommandError("vLLM is not installed. Run `pip install 'cory-rllib[vllm]'`.")
    return backend or ("vllm" if vllm_installed() and not is_quantized else "transformers")


def load_generator(trained: PolicySet, policy_ids: Sequence[str], backend: str, max_sequences: int) -> Generator:
    """Loads policies into a generator.

    Args:
        policy_ids: which to load, without duplicates.
        backend: `transformers` or `vllm`.
        max_sequences: maximum number of responses that a vLLM engine generates concurrently.
    """
    models = {policy_id: trained.base_path(policy_id) for policy_id in policy_ids}
    frozen = trained.settings.frozen_models
    weights = {policy_id: trained.checked_weights(policy_id) for policy_id in policy_ids if policy_id not in frozen}
    generator = start_generator(trained.settings, models, backend, max_sequences)
    for policy_id, new_weights in weights.items():
        if stale := generator.load(policy_id, new_weights, trained.update).stale:
            raise CommandError(
                f"vLLM cannot load some weights of {policy_id}, such as {stale[0]}. Use --backend transformers."
            )
    return generator


def start_generator(settings: Settings, models: Mapping[str, str], backend: str, max_sequences: int) -> Generator:
    """Starts a generator in this process, on a GPU if there is one, with the initial weights of models.

    Args:
        backend: `transformers` or `vllm`.
        max_sequences: maximum number of responses that a vLLM engine generates concurrently.
    """
    cuda = torch.cuda.is_available() and not (backend == "vllm" and vllm_build() == "cpu")
    return make_generator(settings, models, backend, torch.device("cuda" if cuda else "cpu"), max_sequences)
