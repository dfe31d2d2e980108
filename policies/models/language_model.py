"""Loads causal LMs, and holds the one frozen base, or reference policy, that a process needs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pickle import UnpicklingError
from typing import Any, Literal, cast

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from policies.models.families import needed_attention
from policies.models.model_check import ModelError, first_line, load_config

_SHORT = 128  # tokens of a row
_frozen: weakref.WeakValueDictionary[tuple[object, ...], PreTrainedModel] = weakref.WeakValueDictionary()

Quantization = Literal["none", "nf4"]


def stop_token_ids(path: str, trust_remote_code: bool = False) -> list[int]:
    """Returns the tokens that a model names as ends of a response, beside its tokenizer's EOS.

    Instruction-tuned models often have several: one ends their turn, another ends a document. Not all of them need
    stand in both files, generation_config.json and config.json.

    Args:
        path: folder or hub id.
        trust_remote_code: run code that comes with the model.

    Raises:
        ModelError: nothing loadable there.
    """
    config = load_config(path, trust_remote_code)
    try:
        named = [GenerationConfig.from_pretrained(path).eos_token_id]
    except OSError:  # many models come without a generation_config.json
        named = []
    written, _ = PreTrainedConfig.get_config_dict(path, trust_remote_code=trust_remote_code)
    named += [part.get("eos_token_id") for part in (written, written.get("text_config") or {})]
    if all(each is None for each in named):
        named = [config.get_text_config().eos_token_id]  # its family's default, which counts only where no file has one
    ends = [end for each in named for end in ([each] if isinstance(each, int) else each or ())]
    return list(dict.fromkeys(ends))


def load_language_model(
    path: str,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
    quantization: Quantization = "none",
    device: str | None = None,
) -> PreTrainedModel:
    """Loads a causal LM with every dropout off, so that sampler and learner see one distribution.

    Args:
        path: folder or hub id.
        trust_remote_code: run code that comes with the model.
        dtype: of its weights, and of what is computed with quantised ones.
        quantization: 4 bits per weight of a linear layer, by bitsandbytes; the model is then on the GPU.
        device: `meta` reads the weights one by one and keeps none: what is left are names, shapes, and how
            transformers has converted them.

    Raises:
        ModelError: nothing loadable there, or weights that are not the model's.
    """
    config = _config_without_dropout(path, trust_remote_code)
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            **_attention(config, trust_remote_code),
            **({"device_map": device} if device else _quantised(quantization, dtype)),
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named below
        )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError, UnpicklingError) as error:
        raise ModelError(f"No causal language model can be loaded from `{path}`: {first_line(error)}") from error
    # transformers fills what is missing with random numbers.
    wrong = [*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])]
    if wrong:
        raise ModelError(
            f"The weights of `{path}` do not go with its config.json: {len(wrong)} parameters are missing or of "
            f"another shape, such as {min(wrong)}. Use the config.json that they were saved with."
        )
    return _without_dropout(model)


def init_empty(path: str, trust_remote_code: bool = False, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Returns what `load_language_model` does, with zeros for weights, which take no memory until they are written to.

    Args:
        path: folder or hub id.
        trust_remote_code: run code that comes with the model.
        dtype: of its weights.

    Raises:
        ModelError: nothing loadable there.
    """
    from accelerate import init_empty_weights

    config = _config_without_dropout(path, trust_remote_code)
    attention = _attention(config, trust_remote_code)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, dtype=dtype, **attention)
    model.tie_weights()
    zeros: dict[int, nn.Parameter] = {}  # a system's pages are its own only once they are written to
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in zeros:
                size = parameter.numel() * dtype.itemsize
                zero = torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(parameter.shape)
                zeros[id(parameter)] = nn.Parameter(zero)
            module.register_parameter(name, zeros[id(parameter)])
    return _without_dropout(model)


def _config_without_dropout(path: str, trust_remote_code: bool) -> PreTrainedConfig:
    config = load_config(path, trust_remote_code)
    for part in (config, config.get_text_config()):  # families with more than text nest their text settings
        for key, value in part.to_dict().items():
            if "drop" in key and isinstance(value, float):
                setattr(part, key, 0.0)
    return config


def _without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return cast(PreTrainedModel, model.eval())


def meta_model(path: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """Returns a causal LM without the memory for its weights: names and shapes alone.

    Raises:
        ModelError: nothing loadable there.
    """
    config = load_config(path, trust_remote_code)
    attention = _attention(config, trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **attention)
    return cast(PreTrainedModel, model.requires_grad_(False))


def shared_base(
    path: str,
    device: torch.device,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
    quantization: Quantization = "none",
    *,
    matrices: torch.dtype | None = None,
    eager: bool = False,
) -> PreTrainedModel:
    """Returns the frozen initial policy pi_0: the reference, and with adapters the base of all policies.

    One object per process, device, types, quantization and attention, however many policies ask for it.

    Args:
        path: folder or hub id.
        device: where it is to be.
        trust_remote_code: run code that comes with the model.
        dtype: of its weights.
        quantization: of its linear layers.
        matrices: type of its linear layers, where it is another. If autocast computes in that type, nothing else comes
            out: it would cast them at every pass.
        eager: compute attention by plain matrix products (`eager_is_faster`).

    Raises:
        ModelError: there is no such model, or it cannot be loaded so.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = (path, str(device), dtype, quantization, matrices, eager)
    model = _frozen.get(key)
    if model is None:
        model = load_language_model(path, trust_remote_code, dtype, quantization).requires_grad_(False)
        if matrices is not None:
            store_matrices(model, matrices)
        if quantization == "none":
            model = model.to(device)
        if eager:
            model.set_attn_implementation("eager")
        _frozen[key] = model
    return model


def store_matrices(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Gives linear layers another type, but for one whose weight is an embedding too, which autocast does not cast."""
    tied = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)}
    for layer in model.modules():
        if isinstance(layer, nn.Linear | Conv1D) and id(layer.weight) not in tied:
            layer.to(dtype)


def base_dtype(setting: str, device: torch.device) -> torch.dtype:
    """The type that a frozen base is stored in: the compute type on a GPU, for its memory.

    On a CPU fp32, which bf16 autocast computes with 1.4 times as fast as with bf16 weights.
    """
    computed = compute_dtype(setting, device)
    return master_dtype(computed) if device.type == "cpu" else computed


def master_dtype(computed: torch.dtype) -> torch.dtype:
    """The type that trained weights, and sums, have where products are computed in `computed`: fp32 or better."""
    return torch.promote_types(computed, torch.float32)


def _quantised(quantization: Quantization, dtype: torch.dtype) -> dict[str, Any]:
    """What `from_pretrained` has to be told to quantise weights as it reads them."""
    if quantization == "none":
        return {}
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    return {"quantization_config": config, "device_map": {"": 0}}  # Ray shows a process its own GPUs only


def compute_dtype(setting: str, device: torch.device) -> torch.dtype:
    """Resolves `auto`: bf16 where the device multiplies it in hardware, else fp32.

    No setting offers `fp64`: it shows what is rounding and what is not.
    """
    if setting == "bf16":
        return torch.bfloat16
    if setting in ("fp32", "fp64"):
        return torch.float64 if setting == "fp64" else torch.float32
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    able = torch.cpu.get_capabilities()
    return torch.bfloat16 if able.get("avx512_bf16") or able.get("amx_tile") else torch.float32


def eager_is_faster(dtype: torch.dtype, device: torch.device, longest: int | None) -> bool:
    """Whether a run trains faster with eager attention. Decided once, as two implementations score a row differently.

    Plain matrix products where all bf16 rows are short, on a CPU, else what transformers chose for the family, as a
    rule PyTorch's fused one. Forward and backward of 64 rows, 5 M parameters: plain takes 0.78 of the fused one's time
    at 20 tokens and 0.93 at 128; in fp32 they are equal. Plain memory grows with the square of the length. A run whose
    longest row may be longer pays for it where its rows are short: on another machine, the fused one took 1.4 times the
    plain one's time at 60 tokens, 1.25 times at 128 and 1.07 times at 200.

    Args:
        dtype: the compute type.
        device: where it computes.
        longest: tokens of the longest row of the run; None: not known.
    """
    return device.type == "cpu" and dtype == torch.bfloat16 and longest is not None and longest <= _SHORT


def _attention(config: PreTrainedConfig, trust_remote_code: bool) -> dict[str, str]:
    """What a model's class has to be told of the attention that its definition needs."""
    needed = needed_attention(config)
    return {} if needed is None else {"attn_implementation": needed}


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Pads prompts on the left with token 0.

    Returns:
        `(tokens, mask)`, both int64 `[B, P]`; the mask is 0 on padding.
    """
    width = max(len(prompt) for prompt in prompts)
    tokens = np.zeros((len(prompts), width), dtype=np.int64)
    mask = np.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return torch.from_numpy(tokens), torch.from_numpy(mask)
