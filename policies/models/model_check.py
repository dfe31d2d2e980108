"""Checks whether a model can be used (folder, family, vocabulary, lengths) without loading its weights."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    PreTrainedConfig,
)

from policies.models.families import LOGPROB_TOLERANCE, read_family_table
from policies.models.revision import split_revision


class ModelError(ValueError):
    """A model cannot be loaded or used; the message names the model, the reason and the fix."""


def check_model(path: str, context: int, trust_remote_code: bool = False, tensor_parallel_size: int = 1) -> int:
    """Checks that a model exists and supports the given lengths, without loading its weights.

    Args:
        context: maximal number of tokens of a prompt and its response.

    Returns:
        The size of the vocabulary: embedding rows, which may be more or fewer than the tokenizer's tokens.
    """
    check_model_folder(path, weights=False)
    config = load_config(path, trust_remote_code)
    if read_family_table().families.get(config.model_type, {}).get("padding", 0) >= LOGPROB_TOLERANCE:
        raise ModelError(
            f"`{path}` is of the family {config.model_type}, whose code ignores padding or positions: "
            "log-probabilities would depend on the other rows of a batch. Set model to one of another family."
        )
    config, positions = config.get_text_config(), max_positions(path, trust_remote_code)
    if positions is not None and context > positions:
        raise ModelError(
            f"max_prompt_tokens + max_response_tokens is {context} tokens, but `{path}` has {positions} positions. "
            "Lower one of them."
        )
    check_tensor_parallel(config, tensor_parallel_size)
    return int(config.vocab_size)


def max_positions(path: str, trust_remote_code: bool = False) -> int | None:
    """Returns the number of positions of a model; None: unlimited."""
    check_model_folder(path, weights=False)
    return getattr(load_config(path, trust_remote_code).get_text_config(), "max_position_embeddings", None)


def check_tensor_parallel(config: PreTrainedConfig, parts: int) -> None:
    """Checks that vLLM can split a model's attention heads over `parts` devices.

    vLLM gives every device equally many query heads, and equally many key-value heads or copies of one.
    """
    if parts == 1:
        return
    heads = config.num_attention_heads
    kv_heads = num_kv_heads(config)
    valid = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if parts not in valid:
        name = config.name_or_path or "a model"
        raise ModelError(
            f"tensor_parallel_size={parts} cannot split {name} with {heads} attention heads and {kv_heads} key-value "
            f"heads. Valid: {', '.join(map(str, valid))}."
        )


def num_kv_heads(config: PreTrainedConfig) -> int:
    """Number of key-value heads; equal to the query heads without grouped-query attention; 0 without attention."""
    names = ("num_key_value_heads", "num_kv_heads", "num_attention_heads")
    return next((int(heads) for name in names if (heads := getattr(config, name, None))), 0)


def attention_head_dim(config: PreTrainedConfig) -> int:
    """Width of an attention head; 0 without attention."""
    heads = getattr(config, "num_attention_heads", 0)
    return getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)


def check_model_folder(path: str, *, weights: bool = True) -> None:
    """Checks that a model's folder has a configuration and weights, and that no weight file is truncated.

    Args:
        path: the folder; a hub id is not checked.
    """
    folder = Path(path)
    if not folder.is_dir():
        if path.startswith((".", "/", "~")):
            raise ModelError(f"No model in {path}: no such folder. Correct the setting model.{_upload_hint(path)}")
        return
    if not (folder / "config.json").is_file():
        raise ModelError(f"No model in {path}: it has no config.json. Correct the setting model.{_upload_hint(path)}")
    if not weights:
        return
    if not any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin")):
        raise ModelError(
            f"`{folder}` holds no weights (*.safetensors). Copy them there, or correct the setting model."
            f"{_upload_hint(path)}"
        )
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):  # reads the header and compares it with the file's length
                pass
        except SafetensorError as error:
            raise ModelError(f"The weights {file} are damaged ({error}). Copy or download them again.") from error


def load_config(path: str, trust_remote_code: bool) -> PreTrainedConfig:
    """Reads the configuration of a causal LM."""
    from cory_env.tokenizer import go_offline_if_unreachable, offline_reason  # learning needs no environment

    hub_id, revision = split_revision(path)
    if not Path(path).exists():
        go_offline_if_unreachable()
    try:
        config = AutoConfig.from_pretrained(hub_id, **revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise ModelError(f"`{path}` contains Python code. If you trust it, set trust_remote_code=true.") from error
        reason = offline_reason(path)
        raise ModelError(
            f"No language model found at `{path}`: {first_line(error) if reason is None else f'{reason}.'}"
            f"{_upload_hint(path)}"
        ) from error
    config_class = type(config)
    causal = config_class in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in getattr(config, "auto_map", ())
    encoder = config.is_encoder_decoder or (
        config_class in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    )
    if encoder or not causal:
        raise ModelError(f"`{path}` ({config.model_type}) is not a causal language model. Correct the setting model.")
    return config


def _upload_hint(path: str) -> str:
    from cory_env.home import upload_hint  # learning needs no environment

    return upload_hint(path)


def first_line(error: Exception) -> str:
    """Returns the first line of a library's error message."""
    return str(error).strip().split("\n")[0]
