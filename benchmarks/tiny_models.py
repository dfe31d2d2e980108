"""Tiny random models of a family, from a model's own configuration: what its code does, without its weights.

Does it honour padding? Which attention does it need?
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from policies.compat.transformers import attn_implementation

VOCABULARY = 128
HEADS, HEAD_WIDTH = 4, 32  # the narrowest heads that vLLM's attention on a CPU takes
HIDDEN = HEADS * HEAD_WIDTH
WINDOW = 8  # shorter than the rows that are compared
_SCALE = 0.3  # of random weights: attention is then as sharp as a trained model's, so a soft cap or a sink shows
_EMBEDDING_SCALE = 0.05  # with more, a tied head only repeats the last token

_SIZES: dict[str, float] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "lru_width", "attention_hidden_size"), HIDDEN),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("head_dim", "v_head_dim"), HEAD_WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "shared_intermediate_size"), 192),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size"), WINDOW),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "rotary_dim"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "state_size"), 16),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "attn_layer_period", "expert_layer_period"), 2),
    "ffn_hidden_size": 4 * HIDDEN,  # of Falcon, from which vLLM reads no other width
    "logit_scale": 1.0,
    "qk_head_dim": 32,
    "attn_layer_offset": 1,
    "mamba_d_ssm": 2 * HIDDEN,
    "mamba_n_heads": 8,
    "mamba_d_head": 2 * HIDDEN // 8,
    "mamba_dt_rank": 8,
    "time_step_rank": 8,
    "mamba_chunk_size": 16,
    "chunk_size": 16,
}
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
_SAME_FOR_MAMBA = {"mamba": {"intermediate_size": 2 * HIDDEN}, "mamba2": {"num_heads": 8}}
_LENGTHS = ((3, 9), (14, 4), (24, 6))
"""Prompts and responses of the rows that are compared, in tokens; some are longer than a tiny model's window."""


class CannotShrink(Exception):
    """A configuration has no small form that its family's code accepts."""


def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns a configuration of the same kind with tiny sizes.

    What decides how the family computes is kept: kinds of layers, grouped keys, soft caps, tied heads, biases.

    Args:
        config: of a causal LM; it is not changed. Of a family with more than text, that of its text part.
    """
    tiny = copy.deepcopy(config)
    old = {name: value for name, value in config.to_dict().items() if not isinstance(value, PreTrainedConfig)}
    sizes = {**_SIZES, **_SAME_FOR_MAMBA.get(config.model_type, {})}
    heads = next((old[name] for name in ("num_attention_heads", "n_head", "num_heads") if old.get(name)), None)
    hidden = next((old[name] for name in ("hidden_size", "n_embd", "d_model") if old.get(name)), None)
    layers = next((old[name] for name in _LAYERS if isinstance(old.get(name), int)), 0)
    kept_kinds = _layers(old, layers)
    if "qk_rope_head_dim" in old:  # multi-head latent attention: the rotated part has a separate width
        sizes["head_dim"] = sizes["qk_rope_head_dim"]
    for name, value in old.items():
        if isinstance(value, list) and len(value) == layers and layers > 1:
            setattr(tiny, name, [value[index] for index in kept_kinds])
        elif name in _LAYERS:
            setattr(tiny, name, len(kept_kinds))
        elif name in _KEY_HEADS:
            setattr(tiny, name, HEADS if value in (heads, None) else min(value, 2))
        elif name == "word_embed_proj_dim":
            setattr(tiny, name, HIDDEN if value == hidden else HIDDEN // 2)
        elif name in sizes and (value or name == "head_dim"):
            setattr(tiny, name, sizes[name])
        elif name.endswith("token_id"):
            setattr(tiny, name, _first(value, 0))
        elif name == "attention_types":  # GPT-Neo's
            setattr(tiny, name, [[value[0][0], 1]])
            tiny.attention_layers = list(value[0][0])
        elif name in ("rope_parameters", "rope_scaling") and isinstance(value, Mapping):
            setattr(tiny, name, _rope(value))
    tiny.vocab_size = VOCABULARY
    return tiny


def tiny_model(
    config: PreTrainedConfig, *, attention: str | None = None, trust_remote_code: bool = False, seed: int = 0
) -> PreTrainedModel:
    """Builds a random model of a family, in fp32 and in evaluation mode.

    Args:
        config: of a model of any size.
        attention: the implementation; None: what transformers chooses for the family.
        trust_remote_code: run code that comes with the model.
        seed: of its weights.

    Raises:
        CannotShrink: the family's code does not take the small configuration.
    """
    text = config.get_text_config()
    if text is not config and type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CannotShrink(f"{text.model_type} is no causal language model")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(
                shrink(text),
                trust_remote_code=trust_remote_code,
                dtype=torch.float32,
                **({"attn_implementation": attention} if attention else {}),
            )
            randomise(model)
    except Exception as error:  # of any kind: each family has its own checks
        raise CannotShrink(f"{type(error).__name__}: {error}") from error
    return cast(PreTrainedModel, model.eval())


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    """Gives matrices random values of one scale, and changes all others a little."""
    embeddings = {id(layer.weight) for layer in model.modules() if isinstance(layer, torch.nn.Embedding)}
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        if parameter.dim() > 1:
            parameter.copy_((_EMBEDDING_SCALE if id(parameter) in embeddings else _SCALE) * noise)
        else:
            parameter.add_(0.1 * noise)


def _layers(config: Mapping[str, Any], layers: int) -> list[int]:
    """Places of the layers to keep: the first of every kind, at least two."""
    lists = [value for value in config.values() if isinstance(value, list) and len(value) == layers]
    kinds = [repr([value[index] for value in lists]) for index in range(layers)]
    kept_kinds = sorted({kinds.index(kind) for kind in kinds})
    least = len(config.get("block_types") or ()) or 2
    return sorted({*kept_kinds, *list(range(layers))[:least]}) if len(kept_kinds) < least else kept_kinds[:8]


def _first(value: Any, default: int) -> int | None:
    return None if value is None else default


def _rope(value: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary embeddings, per kind of layer or for all; without a scaling whose lists of factors belong to a width."""
    if any(isinstance(entry, Mapping) for entry in value.values()):
        return {name: _rope(entry) for name, entry in value.items() if isinstance(entry, Mapping)}
    if not any(isinstance(entry, list) for entry in value.values()):
        return dict(value)
    kept_kinds = {name: value[name] for name in ("rope_theta", "partial_rotary_factor") if value.get(name) is not None}
    return {"rope_type": "default", **kept_kinds}


def padding_difference(model: PreTrainedModel) -> float:
    """Returns by how much rows of one batch, padded, differ from each row alone: the largest difference, in nats.

    Raises:
        CannotShrink: the family's code does not take such rows.
    """
    rows = _rows()
    single = [_logprobs(model, [row])[0] for row in rows]
    return _largest(single, _logprobs(model, rows))


def attention_difference(config: PreTrainedConfig, trust_remote_code: bool = False) -> float | None:
    """Returns by how much the attention that transformers chooses for a family differs from eager; None: it is eager.

    Raises:
        CannotShrink: the family's code does not take a small configuration.
    """
    chosen = tiny_model(config, trust_remote_code=trust_remote_code)
    if attn_implementation(chosen) == "eager":
        return None
    eager = tiny_model(config, trust_remote_code=trust_remote_code, attention="eager")
    return _largest(_logprobs(chosen, _rows()), _logprobs(eager, _rows()))


@cache
def _rows() -> list[tuple[list[int], list[int]]]:
    """Prompts and responses."""
    random = torch.Generator().manual_seed(0)

    def tokens(length: int) -> list[int]:
        return torch.randint(1, VOCABULARY, (length,), generator=random).tolist()

    return [(tokens(prompt), tokens(response)) for prompt, response in _LENGTHS]


@torch.no_grad()
def _logprobs(model: PreTrainedModel, rows: list[tuple[list[int], list[int]]]) -> list[Tensor]:
    """Log-probabilities of the responses' tokens; prompts are padded on the left, responses on the right."""
    width = max(len(prompt) for prompt, _ in rows)
    tokens = torch.zeros(len(rows), width + max(len(response) for _, response in rows), dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for index, (prompt, response) in enumerate(rows):
        span = slice(width - len(prompt), width + len(response))
        tokens[index, span], mask[index, span] = torch.tensor(prompt + response), 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    try:
        logits = model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
    except Exception as error:  # of any kind, as when it is built
        raise CannotShrink(f"{type(error).__name__}: {error}") from error
    logprobs = torch.log_softmax(logits.float(), -1)
    return [
        logprobs[index, width - 1 : width - 1 + len(response)].gather(1, torch.tensor(response)[:, None]).squeeze(1)
        for index, (_, response) in enumerate(rows)
    ]


def _largest(some: list[Tensor], others: list[Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(some, others, strict=True))
