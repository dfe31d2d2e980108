"""Loads causal LMs, and holds the one frozen base, or reference policy, that a process needs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

_SHORT = 128  # tokens of a row
_chosen: weakref.WeakKeyDictionary[PreTrainedModel, str] = weakref.WeakKeyDictionary()  # attention as loaded
_frozen: weakref.WeakValueDictionary[tuple[object, ...], PreTrainedModel] = weakref.WeakValueDictionary()

Quantization = Literal["none", "nf4"]


class ModelError(ValueError):
    """A model cannot be loaded or used; the message says which, why, and what to do."""


def check_model(path: str, tokens: int, context: int, trust_remote_code: bool = False, tensor_parallel: int = 1) -> int:
    """Checks that a model goes with its tokenizer and with the lengths asked for, without loading its weights.

    Args:
        path: folder or hub id.
        tokens: size of the tokenizer.
        context: longest prompt and response together, in tokens.
        trust_remote_code: run code that comes with the model.
        tensor_parallel: devices that the model is split over.

    Returns:
        The model's vocabulary: embedding rows, which may be more than the tokenizer's tokens.

    Raises:
        ModelError: nothing loadable there, fewer embeddings than tokens, a context longer than the model's, or heads
            that cannot be split.
    """
    _check_weights(Path(path))
    config = _load_config(path, trust_remote_code).get_text_config()
    if tokens > config.vocab_size:
        raise ModelError(
            f"The tokenizer of `{path}` has {tokens} tokens, but the model has embeddings for {config.vocab_size}. "
            "Use the tokenizer that the model was trained with, or resize the model's embeddings."
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and context > positions:
        raise ModelError(
            f"max_prompt + max_response is {context} tokens, but `{path}` has {positions} positions. Lower them to fit."
        )
    check_split(config, tensor_parallel)
    return int(config.vocab_size)


def check_split(config: PreTrainedConfig, parts: int) -> None:
    """Checks that a model's attention heads can be dealt to so many devices, as vLLM does it: the query heads evenly,
    and of grouped keys and values an equal number, or copies, to each.

    Raises:
        ModelError: they cannot; the message names the numbers that would work.
    """
    if parts == 1:
        return
    heads = config.num_attention_heads
    groups = key_value_heads(config)
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (groups % n == 0 or n % groups == 0)]
    if parts not in fitting:
        raise ModelError(
            f"tensor_parallel={parts} cannot split a model with {heads} attention heads and {groups} of keys and "
            f"values. What would work: {', '.join(map(str, fitting))}."
        )


def key_value_heads(config: PreTrainedConfig) -> int:
    """Heads of a model's keys and values: as many as of its queries, unless they are grouped."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def stop_token_ids(path: str, trust_remote_code: bool = False) -> list[int]:
    """Returns the tokens that a model names as ends of a response, beside its tokenizer's EOS.

    Instruction-tuned models often have several: one ends their turn, another ends a document.

    Args:
        path: folder or hub id.
        trust_remote_code: run code that comes with the model.

    Raises:
        ModelError: nothing loadable there.
    """
    try:
        found = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # many models come without a generation_config.json
        found = _load_config(path, trust_remote_code).get_text_config().eos_token_id
    return [found] if isinstance(found, int) else list(found or ())


def load_language_model(
    path: str,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
    quantization: Quantization = "none",
) -> PreTrainedModel:
    """Loads a causal LM with every dropout off, so that sampler and learner see one distribution.

    Args:
        path: folder or hub id.
        trust_remote_code: run code that comes with the model.
        dtype: of its weights, and of what is computed with quantised ones.
        quantization: 4 bits per weight of a linear layer, by bitsandbytes; the model is then on the GPU.

    Raises:
        ModelError: nothing loadable there, or weights that are not the model's.
    """
    config = _load_config(path, trust_remote_code)
    for part in (config, config.get_text_config()):  # families with more than text nest their text settings
        for key, value in part.to_dict().items():
            if "drop" in key and isinstance(value, float):
                setattr(part, key, 0.0)
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            **_quantised(quantization, dtype),
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named below
        )
    except (OSError, ValueError, RuntimeError, SafetensorError, UnpicklingError) as error:
        raise ModelError(f"No causal language model can be loaded from `{path}`: {_first_line(error)}") from error
    # transformers fills what is missing with random numbers.
    wrong = [*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])]
    if wrong:
        raise ModelError(
            f"The weights of `{path}` do not go with its config.json: {len(wrong)} parameters are missing or of "
            f"another shape, such as {min(wrong)}. Use the config.json that they were saved with."
        )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return cast(PreTrainedModel, model.eval())


def empty_language_model(path: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """Returns a causal LM without the memory for its weights: names and shapes alone.

    Raises:
        ModelError: nothing loadable there.
    """
    config = _load_config(path, trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return cast(PreTrainedModel, model.requires_grad_(False))


def shared_base(
    path: str,
    device: torch.device,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
    quantization: Quantization = "none",
) -> PreTrainedModel:
    """Returns the frozen initial policy pi_0: the reference, and with adapters the base of all policies.

    One object per process, device, type and quantization, however many policies ask for it.

    Raises:
        ModelError: there is no such model, or it cannot be loaded so.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = (path, str(device), dtype, quantization)
    model = _frozen.get(key)
    if model is None:
        model = load_language_model(path, trust_remote_code, dtype, quantization).requires_grad_(False)
        if quantization == "none":
            model = model.to(device)
        _frozen[key] = model
    return model


def base_dtype(setting: str, device: torch.device) -> torch.dtype:
    """The type that a frozen base is stored in: the compute type on a GPU, for its memory.

    On a CPU fp32, which bf16 autocast computes with 1.4 times as fast as with bf16 weights.
    """
    return torch.float32 if device.type == "cpu" else compute_dtype(setting, device)


def _quantised(quantization: Quantization, dtype: torch.dtype) -> dict[str, Any]:
    """What `from_pretrained` has to be told to quantise weights as it reads them.

    Raises:
        ModelError: there is no GPU, or the library is missing.
    """
    if quantization == "none":
        return {}
    if not torch.cuda.is_available():
        raise ModelError(
            f"quantization={quantization} needs a CUDA GPU, and there is none here. Set quantization=none."
        )
    if find_spec("bitsandbytes") is None:
        raise ModelError(
            f"quantization={quantization} needs the library bitsandbytes: pip install 'cory-rllib[quantization]'."
        )
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    return {"quantization_config": config, "device_map": {"": 0}}  # Ray shows a process its own GPUs only


def compute_dtype(setting: str, device: torch.device) -> torch.dtype:
    """Resolves `auto`: bf16 where the device multiplies it in hardware, else fp32."""
    if setting == "bf16":
        return torch.bfloat16
    if setting == "fp32":
        return torch.float32
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def choose_attention(model: PreTrainedModel, dtype: torch.dtype, tokens: int) -> None:
    """Gives a model the attention that trains fastest on rows of `tokens` tokens.

    Plain matrix products for short bf16 rows on a CPU, else what transformers chose for the family, as a rule
    PyTorch's fused one. Forward and backward of 64 rows, 5 M parameters: plain takes 0.78 of the fused one's time at 20
    tokens and 0.93 at 128; in fp32 they are equal. Plain memory grows with the square of the length.
    """
    plain = model.device.type == "cpu" and dtype == torch.bfloat16 and tokens <= _SHORT
    wanted = "eager" if plain else _chosen.setdefault(model, model.config._attn_implementation)
    if model.config._attn_implementation != wanted:
        _chosen.setdefault(model, model.config._attn_implementation)
        model.set_attn_implementation(wanted)


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


def _check_weights(folder: Path) -> None:
    """Checks that a model's folder holds weights, and that no file of them was cut; a hub id is left to its download.

    Raises:
        ModelError: there are none, or one is damaged.
    """
    if not folder.is_dir():
        return
    if not any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin")):
        raise ModelError(f"`{folder}` holds no weights (*.safetensors). Copy them there, or correct the setting model.")
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):  # reads the header, and compares it with the file's length
                pass
        except SafetensorError as error:
            raise ModelError(f"The weights {file} are damaged ({error}). Copy or download them again.") from error


def _load_config(path: str, trust_remote_code: bool) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(f"No language model was found at `{path}`: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
