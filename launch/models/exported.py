"""What an export consists of: a whole model, or an adapter for its base, and how to sample from it."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from launch.console.errors import CommandError
from launch.models.trained import Trained
from policies.models.adapters import adapted, peft_config, peft_names
from policies.models.average import scaled
from policies.models.language_model import empty_language_model, load_language_model
from policies.models.model_names import model_path
from policies.settings.settings import Settings, Tokenizers


def whole_model(trained: Trained, policy: str, step: float = 1.0) -> PreTrainedModel:
    """Returns the base model with a policy's weights in it, fp32, and with the base's own configuration.

    An adapter is merged into its base.

    Args:
        trained: where the policy is read from.
        policy: one of the run's, or the `AVERAGE` of them.
        step: of the way from the base to the policy; 1 is the policy.

    Raises:
        CommandError: the weights are not of this model, or the base that the adapter is for is quantised.
        ModelError: it cannot be loaded.
    """
    settings = trained.settings
    if settings.quantization != "none":
        raise CommandError(
            f"The adapter was trained on a base in {settings.quantization}. Merged into anything else it would answer "
            "otherwise: leave --merge out."
        )
    path = model_path(trained.base(policy))
    model = load_language_model(path, settings.trust_remote_code)
    lora = trained.lora(policy)
    if lora is None:
        weights = trained.weights(policy)
        trained.check_base(policy, weights, dict(model.named_parameters()))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                reached = torch.from_numpy(np.array(weights[name]))
                parameter.copy_(reached if step == 1 else parameter + step * (reached - parameter))
    else:
        from peft import get_peft_model, set_peft_model_state_dict

        _check_adapter(trained, policy)
        with_adapter = get_peft_model(model, peft_config(model, lora))
        set_peft_model_state_dict(with_adapter, _tensors(trained, policy, torch.float32, step))
        model = cast(PreTrainedModel, with_adapter.merge_and_unload())
    # Training switches dropout off in the configuration; who trains on may want it back.
    model.config = AutoConfig.from_pretrained(path, trust_remote_code=settings.trust_remote_code)
    return model


def save_adapter(trained: Trained, policy: str, folder: Path, dtype: torch.dtype, step: float = 1.0) -> None:
    """Writes a policy's adapter as PEFT does: `adapter_model.safetensors` and `adapter_config.json`.

    Args:
        trained: where the policy is read from.
        policy: one of the run's, or the `AVERAGE` of them.
        folder: where to.
        dtype: of the weights.
        step: of the way from the base to the policy; 1 is the policy.

    Raises:
        CommandError: it is not of this base.
        ModelError: there is no base.
        OSError: the folder cannot be written.
    """
    lora = trained.lora(policy)
    base = _check_adapter(trained, policy)
    assert lora is not None
    config = peft_config(base, lora)
    config.base_model_name_or_path = base_name(trained, policy)
    config.inference_mode = True
    config.save_pretrained(folder)
    save_file(_tensors(trained, policy, dtype, step), folder / "adapter_model.safetensors", metadata={"format": "pt"})


def base_name(trained: Trained, policy: str) -> str:
    """Returns where a policy's base is: a hub id, or a folder whatever folder one is in."""
    path = model_path(trained.base(policy))
    return str(Path(path).resolve()) if Path(path).is_dir() else path


def generation_config(settings: Settings, tokenizers: Tokenizers, policy: str) -> GenerationConfig:
    """Returns what makes `transformers` and vLLM sample and stop as in training: by temperature alone."""
    tokenizer = tokenizers[policy]
    named = (tokenizer.eos_token_id, *settings.stop_token_ids(tokenizers, policy))
    ends = [token for token in dict.fromkeys(named) if token is not None]
    return GenerationConfig(
        do_sample=True,
        temperature=settings.temperature,
        top_k=0,  # without it, transformers samples from the likeliest 50
        top_p=1.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=ends,
        pad_token_id=ends[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
    )


def _check_adapter(trained: Trained, policy: str) -> PreTrainedModel:
    """Returns the base without its weights; an adapter must fit it."""
    settings, lora = trained.settings, trained.lora(policy)
    assert lora is not None
    base = empty_language_model(model_path(trained.base(policy)), settings.trust_remote_code)
    own = {name: p for name, p in adapted(base, lora).named_parameters() if p.requires_grad}
    trained.check_base(policy, trained.weights(policy), own)
    return base


def _tensors(trained: Trained, policy: str, dtype: torch.dtype, step: float) -> dict[str, torch.Tensor]:
    """Returns an adapter's weights by PEFT's names."""
    weights = peft_names(scaled(trained.weights(policy), step))
    return {name: torch.from_numpy(array).to(dtype) for name, array in weights.items()}
