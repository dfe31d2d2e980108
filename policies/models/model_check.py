"""Whether a model can be used: its folder, family, vocabulary and lengths; its weights are not loaded."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    PreTrainedConfig,
)

from policies.models.families import LIMIT, read_table


class ModelError(ValueError):
    """A model cannot be loaded or used; the message says which, why, and what to do."""


def check_model(path: str, context: int, trust_remote_code: bool = False, tensor_parallel_size: int = 1) -> int:
    """Checks that a model is there and goes with the lengths asked for, without loading its weights.

    Args:
        path: folder or hub id.
        context: longest prompt and response together, in tokens.
        trust_remote_code: run code that comes with the model.
        tensor_parallel_size: devices that the model is split over.

    Returns:
        The model's vocabulary: embedding rows, which may be more than the tokenizer's tokens, or fewer.

    Raises:
        ModelError: nothing loadable there, a family whose code ignores padding, a context longer than the model's, or
            heads that cannot be split.
    """
    check_folder(path, weights=False)
    config = load_config(path, trust_remote_code)
    if read_table().families.get(config.model_type, {}).get("padding", 0) >= LIMIT:
        raise ModelError(
            f"`{path}` is of the family {config.model_type}, whose code ignores padding or positions: "
            "log-probabilities would depend on what else is in a batch. Set model to one of another family."
        )
    config = config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and context > positions:
        raise ModelError(
            f"max_prompt_tokens + max_response_tokens is {context} tokens, but `{path}` has {positions} positions. "
            "Lower them to fit."
        )
    check_split(config, tensor_parallel_size)
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
        name = config.name_or_path or "a model"
        raise ModelError(
            f"tensor_parallel_size={parts} cannot split {name} with {heads} attention heads and {groups} of keys and "
            f"values. What would work: {', '.join(map(str, fitting))}."
        )


def key_value_heads(config: PreTrainedConfig) -> int:
    """Heads of a model's keys and values: as many as of its queries, unless they are grouped; 0 without attention."""
    names = ("num_key_value_heads", "num_kv_heads", "num_attention_heads")
    return next((int(heads) for name in names if (heads := getattr(config, name, None))), 0)


def head_width(config: PreTrainedConfig) -> int:
    """Width of an attention head; 0 without attention."""
    heads = getattr(config, "num_attention_heads", 0)
    return getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)


def check_folder(path: str, *, weights: bool = True) -> None:
    """Checks that a model's folder holds its configuration and weights, and that no file was cut.

    Args:
        path: of the folder; a hub id is left to its download.
        weights: look at these too.

    Raises:
        ModelError: there is no such folder, something is missing, or a file is damaged.
    """
    folder = Path(path)
    if not folder.is_dir():
        if path.startswith((".", "/", "~")):
            raise ModelError(f"There is no model in {path}: no such folder. Correct the setting model.")
        return
    if not (folder / "config.json").is_file():
        raise ModelError(f"There is no model in {path}: it has no config.json. Correct the setting model.")
    if not weights:
        return
    if not any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin")):
        raise ModelError(f"`{folder}` holds no weights (*.safetensors). Copy them there, or correct the setting model.")
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):  # reads the header, and compares it with the file's length
                pass
        except SafetensorError as error:
            raise ModelError(f"The weights {file} are damaged ({error}). Copy or download them again.") from error


def load_config(path: str, trust_remote_code: bool) -> PreTrainedConfig:
    """Reads the configuration of a causal LM.

    Raises:
        ModelError: there is none, or it is of a model that cannot go on with a text.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"`{path}` comes with Python code of its own. If you trust it, set trust_remote_code=true."
            ) from error
        raise ModelError(f"No language model was found at `{path}`: {first_line(error)}") from error
    kind = type(config)
    known = kind in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in getattr(config, "auto_map", ())
    encoder = config.is_encoder_decoder or (kind in MODEL_FOR_MASKED_LM_MAPPING and not config.is_decoder)
    if encoder or not known:
        raise ModelError(f"`{path}` ({config.model_type}) is not a causal language model. Correct the setting model.")
    return config


def first_line(error: Exception) -> str:
    """Returns the first line of what a library said."""
    return str(error).strip().split("\n")[0]
