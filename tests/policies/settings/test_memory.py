"""Tests of the estimate for activations against the tensors that a forward pass saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from policies.models.adapters import add_lora
from policies.models.language_model import cast_linear_layers, eager_is_faster, load_language_model
from policies.settings.memory import ModelShape, estimate_learner, model_shapes
from policies.settings.settings import Settings
from tests.paper import make_settings

ROWS, PROMPT, RESPONSE = 3, 8, 8
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
LLAMA = LlamaConfig(**SIZES)
GPT2: dict[str, Any] = {
    "vocab_size": 64, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2
}  # fmt: skip
CONFIGS = {
    "gpt2": GPT2Config(**GPT2),
    "gpt2, one kernel": GPT2Config(activation_function="gelu_pytorch_tanh", **GPT2),
    "llama": LLAMA,
    "llama, as many keys": LlamaConfig(**SIZES | {"num_key_value_heads": 4}),
    "llama, narrow": LlamaConfig(**SIZES | {"intermediate_size": 128}),
    "llama, experts named": LlamaConfig(**SIZES, num_experts_per_tok=8),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=64),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=64),
    "olmo2": Olmo2Config(**SIZES),
    "phi3": Phi3Config(**SIZES),
    "mixtral": MixtralConfig(**SIZES, **EXPERTS),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=64, moe_intermediate_size=96),
}


def settings_of(path: Path, config: PreTrainedConfig, **values: Any) -> Settings:
    config.save_pretrained(path)
    defaults = {
        "model": str(path),
        "num_agents": 1,
        "queries_per_update": ROWS,
        "minibatch_size": ROWS,
        "micro_batch_size": ROWS,
    }
    return make_settings({**defaults, "max_prompt_tokens": PROMPT, "max_response_tokens": RESPONSE, **values})


def plain_shapes(settings: Settings) -> list[ModelShape]:
    """Returns the sizes of the models as if no prefixes were shared."""
    return [shape._replace(tree_masks=0) for shape in model_shapes(settings)]


def saved_bytes(path: str, settings: Settings) -> float:
    """Returns the bytes that a real forward pass saves, without weights and logits."""
    bf16 = settings.dtype == "bf16"
    dtype, length = torch.bfloat16 if bf16 else torch.float32, PROMPT + RESPONSE
    model = load_language_model(path)
    model = add_lora(model.requires_grad_(False), settings.lora) if settings.lora else model
    if bf16:
        cast_linear_layers(model, dtype)
    if eager_is_faster(dtype, torch.device("cpu"), length):
        model.set_attn_implementation("eager")
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.ones(ROWS, length, dtype=torch.int64)
    hooks, autocast = saved_tensors_hooks(save, lambda tensor: tensor), torch.autocast("cpu", dtype, enabled=bf16)
    with hooks, autocast:
        model(input_ids=ids, attention_mask=ids, position_ids=ids.cumsum(1) - 1, use_cache=False)
    return float(sum(tensor.untyped_storage().nbytes() for tensor in saved.values()))


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("weights", ["full", "lora"])
def test_estimated_activations_match_a_forward_pass(family: str, dtype: str, weights: str, tmp_path: Path) -> None:
    config = CONFIGS[family]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    rank = {"lora_rank": 4} if weights == "lora" else {}
    settings = settings_of(tmp_path, config, dtype=dtype, weights=weights, **rank)
    estimate = estimate_learner(settings, plain_shapes(settings)).parts["activations"]
    tolerance = 0.3 if settings.lora and family in ("mixtral", "qwen3_moe") else 0.15  # frozen experts save less
    assert estimate == pytest.approx(saved_bytes(str(tmp_path), settings), rel=tolerance)


def test_gradient_checkpointing_saves_the_inputs_of_blocks_and_one_block(tmp_path: Path) -> None:
    plain, checkpointed = (
        settings_of(tmp_path, LLAMA, dtype="fp32", gradient_checkpointing=checkpointing)
        for checkpointing in (False, True)
    )
    models = plain_shapes(plain)
    plain_bytes, checkpointed_bytes = (estimate_learner(s, models).parts["activations"] for s in (plain, checkpointed))
    assert checkpointed_bytes == plain_bytes / 4 + 4 * ROWS * (PROMPT + RESPONSE) * 128 * 4  # four blocks, in fp32


def test_prefix_trees_add_their_mask_and_longer_attention_scores(tmp_path: Path) -> None:
    rows = {"micro_batch_size": 64, "minibatch_size": 64, "queries_per_update": 64}
    settings = settings_of(tmp_path, LLAMA, dtype="bf16", **rows)
    shapes = plain_shapes(settings), model_shapes(settings)
    plain_parts, shared_parts = (estimate_learner(settings, models).parts for models in shapes)
    tokens = 64 * (PROMPT + RESPONSE)
    assert "attention mask" not in plain_parts
    assert shared_parts["attention mask"] == 2 * tokens * 128  # packs of at most 128 tokens with eager attention
    scores = 6 * 4 * tokens * 4  # bytes per key, heads, and layers
    assert shared_parts["activations"] - plain_parts["activations"] == scores * (128 - PROMPT - RESPONSE)


def test_with_a_limit_of_tokens_all_of_them_may_need_logits_if_prefixes_are_shared(tmp_path: Path) -> None:
    rows = {"micro_batch_size": 8, "minibatch_size": 8, "queries_per_update": 8, "micro_batch_tokens": 40}
    settings = settings_of(tmp_path, LLAMA, dtype="fp32", **rows)
    shapes = plain_shapes(settings), model_shapes(settings)
    plain_bytes, shared_bytes = (estimate_learner(settings, models).parts["logits"] for models in shapes)
    positions = 2 * (RESPONSE + 1), 40  # two rows fit into 40 tokens
    assert shared_bytes - plain_bytes == pytest.approx(2 * 4 * 64 * (positions[1] - positions[0]))


def test_a_model_without_attention_has_an_estimate(tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, state_size=8, eos_token_id=2)
    settings = settings_of(tmp_path, config, backend="transformers")
    assert estimate_learner(settings, model_shapes(settings)).parts["activations"] > 0
