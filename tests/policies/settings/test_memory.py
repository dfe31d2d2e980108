"""Tests of the estimate for activations against the tensors that a forward pass saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from policies.models.adapters import add_lora
from policies.models.language_model import cast_linear_layers, load_language_model
from policies.settings.memory import estimate_learner, model_shapes
from policies.settings.settings import Settings
from tests.paper import make_settings

ROWS, PROMPT, RESPONSE = 3, 8, 8
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2: dict[str, Any] = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 64}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "head_dim": 64, "moe_intermediate_size": 96}
LLAMA = LlamaConfig(**SIZES)
CONFIGS = {
    "gpt2": GPT2Config(vocab_size=64, bos_token_id=1, eos_token_id=2, **GPT2),
    "llama": LLAMA,
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS),
}


def settings_of(path: Path, config: PreTrainedConfig, **values: Any) -> Settings:
    config.save_pretrained(path)
    rows = {"queries_per_update": ROWS, "minibatch_size": ROWS, "micro_batch_size": ROWS}
    limits = {"max_prompt_tokens": PROMPT, "max_response_tokens": RESPONSE}
    return make_settings({"model": str(path), "num_agents": 1, **rows, **limits, **values})


def saved_bytes(path: str, settings: Settings) -> float:
    """Returns the bytes that a real forward pass saves, without weights and logits."""
    bf16 = settings.dtype == "bf16"
    dtype, length = torch.bfloat16 if bf16 else torch.float32, PROMPT + RESPONSE
    model = load_language_model(path)
    model = add_lora(model.requires_grad_(False), settings.lora) if settings.lora else model
    if bf16:
        cast_linear_layers(model, dtype)
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
def test_estimated_activations_are_near_those_of_a_forward_pass(
    family: str, dtype: str, weights: str, tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_config(CONFIGS[family]).save_pretrained(tmp_path)
    rank = {"lora_rank": 4} if weights == "lora" else {}
    settings = settings_of(tmp_path, CONFIGS[family], dtype=dtype, weights=weights, **rank)
    estimate = estimate_learner(settings, model_shapes(settings)).parts["activations"]
    ratio = estimate / saved_bytes(str(tmp_path), settings)
    assert (0.65 if family == "qwen3_moe" else 0.8) < ratio < 1.4  # autocast leaves experts in fp32


def test_gradient_checkpointing_saves_the_inputs_of_blocks_and_one_block(tmp_path: Path) -> None:
    plain, checkpointed = (
        settings_of(tmp_path, LLAMA, dtype="fp32", gradient_checkpointing=checkpointing)
        for checkpointing in (False, True)
    )
    models = model_shapes(plain)
    plain_bytes, checkpointed_bytes = (estimate_learner(s, models).parts["activations"] for s in (plain, checkpointed))
    assert checkpointed_bytes == plain_bytes / 4 + 4 * ROWS * (PROMPT + RESPONSE) * 128 * 4  # four blocks, in fp32


def test_with_a_limit_of_tokens_all_of_them_may_need_logits(tmp_path: Path) -> None:
    rows = {"micro_batch_size": 8, "minibatch_size": 8, "queries_per_update": 8}
    limited, unlimited = (settings_of(tmp_path, LLAMA, dtype="fp32", micro_batch_tokens=n, **rows) for n in (40, None))
    parts = [estimate_learner(s, model_shapes(s)).parts for s in (limited, unlimited)]
    positions = 40, 8 * (RESPONSE + 1)
    assert [part["logits"] for part in parts] == [3 * 4 * 64 * count for count in positions]  # also in fp32, once more
    assert parts[1]["activations"] == 4 * parts[0]["activations"]  # two rows fit into 40 tokens
