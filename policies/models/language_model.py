"""Loads causal LMs, and holds the process's one frozen base model, which is also the reference policy."""

from __future__ import annotations

import weakref
from pickle import UnpicklingError
from typing import Any, Literal, cast

import numpy as np
import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from policies.models.families import fix_rope_factors, needed_attention
from policies.models.model_check import ModelError, first_line, load_config
from policies.models.revision import split_revision

_SHORT_ROW_TOKENS = 128
_loaded_bases: weakref.WeakValueDictionary[tuple[object, ...], PreTrainedModel] = weakref.WeakValueDictionary()

Quantization = Literal["none", "nf4"]


def stop_token_ids(path: str, trust_remote_code: bool = False) -> list[int]:
    """Returns the stop tokens in a model's configuration files, which may differ from its tokenizer's EOS.

    Instruction-tuned models often have several: one ends a turn, another a document. They may be spread over
    generation_config.json and config.json.
    """
    config = load_config(path, trust_remote_code)
    hub_id, revision = split_revision(path)
    try:
        entries = [GenerationConfig.from_pretrained(hub_id, **revision).eos_token_id]
    except OSError:  # many models come without a generation_config.json
        entries = []
    raw_config, _ = PreTrainedConfig.get_config_dict(hub_id, **revision, trust_remote_code=trust_remote_code)
    entries += [part.get("eos_token_id") for part in (raw_config, raw_config.get("text_config") or {})]
    if all(entry is None for entry in entries):
        entries = [config.get_text_config().eos_token_id]  # the family's default applies only if no file has one
    token_ids = [token_id for entry in entries for token_id in ([entry] if isinstance(entry, int) else entry or ())]
    return list(dict.fromkeys(token_ids))


def load_language_model(
    path: str,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
    quantization: Quantization = "none",
    device: str | None = None,
    *,
    eager: bool = False,
    max_length: int | None = None,
) -> PreTrainedModel:
    """Loads a causal LM with all dropout disabled, so that sampler and learner compute the same distribution.

    Args:
        dtype: type of the weights; compute type of quantized weights.
        quantization: `nf4`: 4 bits per weight of linear layers, by bitsandbytes; the model is then on the GPU.
        device: `meta` reads the weights one by one without keeping them: names, shapes and transformers' conversions
            remain.
        eager: use eager attention even if the model does not need it (see `eager_is_faster`).
        max_length: maximal number of tokens of a row (see `fix_rope_factors`); None: unknown.
    """
    config = load_config(path, trust_remote_code)
    uses_long_rope = fix_rope_factors(config, max_length)
    _disable_dropout(config)
    hub_id, revision = split_revision(path)
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            hub_id,
            **revision,
            config=config,
            dtype=dtype,
            **_attention_kwargs(config, eager),
            **({"device_map": device} if device else _quantization_kwargs(quantization, dtype)),
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below
        )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError, UnpicklingError) as error:
        raise ModelError(f"No causal language model can be loaded from `{path}`: {first_line(error)}") from error
    # transformers initialises missing weights randomly.
    invalid = [*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])]
    if invalid:
        raise ModelError(
            f"The weights of `{path}` do not match its config.json: {len(invalid)} parameters are missing or have "
            f"another shape, such as {min(invalid)}. Use the config.json that they were saved with."
        )
    if uses_long_rope:  # Phi-3's code drops the cache of a generation at this length, to switch factors
        text_config = model.config.get_text_config()
        text_config.original_max_position_embeddings = text_config.max_position_embeddings
    return _without_dropout(model)


def init_empty(
    path: str,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
    *,
    eager: bool = False,
    max_length: int | None = None,
) -> PreTrainedModel:
    """Like `load_language_model`, but with zeros as weights, which take no memory until they are written to."""
    from accelerate import init_empty_weights

    config = load_config(path, trust_remote_code)
    fix_rope_factors(config, max_length)
    _disable_dropout(config)
    arguments = _from_config_kwargs(path, config, trust_remote_code, eager)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **arguments)
    model.tie_weights()
    zeros: dict[int, nn.Parameter] = {}  # the system allocates a page of zeros only when it is written to
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in zeros:
                size = parameter.numel() * dtype.itemsize
                zero = torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(parameter.shape)
                zeros[id(parameter)] = nn.Parameter(zero)
            module.register_parameter(name, zeros[id(parameter)])
    return _without_dropout(model)


def _disable_dropout(config: PreTrainedConfig) -> None:
    for part in (config, config.get_text_config()):  # multimodal families nest their text configuration
        for key, value in part.to_dict().items():
            if "drop" in key and isinstance(value, float):
                setattr(part, key, 0.0)


def _without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return cast(PreTrainedModel, model.eval())


def meta_model(path: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """Returns a causal LM on the meta device: names and shapes of weights without memory."""
    config = load_config(path, trust_remote_code)
    arguments = _from_config_kwargs(path, config, trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **arguments)
    return cast(PreTrainedModel, model.requires_grad_(False))


def shared_base(
    path: str,
    device: torch.device,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
    quantization: Quantization = "none",
    *,
    linear_dtype: torch.dtype | None = None,
    eager: bool = False,
    max_length: int | None = None,
) -> PreTrainedModel:
    """Returns the frozen initial policy π_0: the reference, and with LoRA the base of all policies.

    All policies share one object per process, device, types, quantization, attention and factors of longrope. For the
    other arguments see `load_language_model`.

    Args:
        linear_dtype: type of the linear layers; None: `dtype`. With autocast to this type the results are the same,
            but the weights need not be cast in every forward pass.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    uses_long_rope = fix_rope_factors(load_config(path, trust_remote_code), max_length)
    key = (path, str(device), dtype, quantization, linear_dtype, eager, uses_long_rope)
    model = _loaded_bases.get(key)
    if model is None:
        model = load_language_model(
            path, trust_remote_code, dtype, quantization, eager=eager, max_length=max_length
        ).requires_grad_(False)
        if linear_dtype is not None:
            cast_linear_layers(model, linear_dtype)
        if quantization == "none":
            model = model.to(device)
        _loaded_bases[key] = model
    return model


def cast_linear_layers(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Casts linear layers to another type, except one tied to the embedding, which autocast does not cast."""
    tied = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)}
    for layer in model.modules():
        if isinstance(layer, nn.Linear | Conv1D) and id(layer.weight) not in tied:
            layer.to(dtype)


def base_dtype(setting: str, device: torch.device) -> torch.dtype:
    """The type that a frozen base is stored in: on a GPU the compute type, to save memory; on a CPU fp32.

    On a CPU, bf16 autocast is 1.4 times as fast with fp32 weights as with bf16 weights.
    """
    forward_dtype = compute_dtype(setting, device)
    return master_dtype(forward_dtype) if device.type == "cpu" else forward_dtype


def master_dtype(forward_dtype: torch.dtype) -> torch.dtype:
    """The type of trained weights and of sums for a compute type: fp32 or better."""
    return torch.promote_types(forward_dtype, torch.float32)


def _quantization_kwargs(quantization: Quantization, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of `from_pretrained` that quantize weights while loading."""
    if quantization == "none":
        return {}
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    return {"quantization_config": config, "device_map": {"": 0}}  # Ray shows a process its own GPUs only


def compute_dtype(setting: str, device: torch.device) -> torch.dtype:
    """Resolves the setting `dtype`; `auto` is bf16 if the device has hardware support for it, else fp32.

    `fp64` is not available as a setting; it serves to tell rounding from errors in tests.
    """
    if setting == "bf16":
        return torch.bfloat16
    if setting in ("fp32", "fp64"):
        return torch.float64 if setting == "fp64" else torch.float32
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    capabilities = torch.cpu.get_capabilities()
    return torch.bfloat16 if capabilities.get("avx512_bf16") or capabilities.get("amx_tile") else torch.float32


def eager_is_faster(dtype: torch.dtype, device: torch.device, max_length: int | None) -> bool:
    """Whether a run is faster with eager attention: on a CPU, in bf16, with rows of at most 128 tokens.

    The choice is made once per run, since two implementations score a row differently. Otherwise the implementation is
    transformers' choice for the family, usually PyTorch's fused attention. Forward and backward of 64 rows with 5 M
    parameters: eager takes 0.78 of the fused time at 20 tokens and 0.93 at 128; in fp32 they are equal. Eager memory
    grows with the square of the length. A run whose rows may exceed 128 tokens loses this gain on its short rows: on
    another machine, fused took 1.4 times the eager time at 60 tokens, 1.25 times at 128 and 1.07 times at 200.

    Args:
        max_length: maximal number of tokens of a row in the run; None: unknown.
    """
    if device.type != "cpu" or dtype != torch.bfloat16:
        return False
    return max_length is not None and max_length <= _SHORT_ROW_TOKENS


def _attention_kwargs(config: PreTrainedConfig, eager: bool = False) -> dict[str, str]:
    """Arguments of a model class for the attention implementation, if transformers' choice is not to be used.

    It must be known when the model is built: some families, such as Falcon, cannot change it later.
    """
    attention = "eager" if eager else needed_attention(config)
    return {} if attention is None else {"attn_implementation": attention}


def _from_config_kwargs(
    path: str, config: PreTrainedConfig, trust_remote_code: bool, eager: bool = False
) -> dict[str, Any]:
    """Arguments of `from_config`: the attention implementation, and the revision of the model's own code."""
    _, revision = split_revision(path)
    own_code = trust_remote_code and "AutoModelForCausalLM" in getattr(config, "auto_map", ())
    code_revision = {"code_revision": revision.get("revision")} if own_code else {}
    return {"trust_remote_code": trust_remote_code, **code_revision, **_attention_kwargs(config, eager)}
