"""The formula for activations, against what a forward pass of a small model keeps for its backward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, Phi3Config, PreTrainedConfig

from policies.models.adapters import adapted
from policies.models.language_model import eager_is_faster, load_language_model, store_matrices
from policies.settings.memory import learner, shapes
from policies.settings.settings import Settings, make_settings

ROWS, PROMPT, RESPONSE = 3, 8, 8
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA = LlamaConfig(**SIZES)
GPT2 = GPT2Config(
    vocab_size=64, n_embd=64, n_layer=4, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2,
    activation_function="gelu_pytorch_tanh",
)  # fmt: skip


def settings_of(path: Path, config: PreTrainedConfig, **values: Any) -> Settings:
    config.save_pretrained(path)
    same = {"model": str(path), "num_agents": 1, "queries": ROWS, "minibatch": ROWS, "micro_batch": ROWS}
    return make_settings({**same, "max_prompt": PROMPT, "max_response": RESPONSE, **values})


def kept_bytes(path: str, settings: Settings) -> float:
    """What is kept of a real forward pass, without the model's own weights and without logits."""
    bf16 = settings.dtype == "bf16"
    computed, length = torch.bfloat16 if bf16 else torch.float32, PROMPT + RESPONSE
    model = load_language_model(path)
    model = adapted(model.requires_grad_(False), settings.lora) if settings.lora else model
    if bf16:
        store_matrices(model, computed)
    if eager_is_faster(computed, torch.device("cpu"), length):
        model.set_attn_implementation("eager")
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.ones(ROWS, length, dtype=torch.int64)
    hooks, autocast = saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", computed, enabled=bf16)
    with hooks, autocast:
        model(input_ids=ids, attention_mask=ids, position_ids=ids.cumsum(1) - 1, use_cache=False)
    return float(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("weights", ["full", "lora"])
def test_activations_are_counted_within_a_fifth_of_what_a_forward_pass_keeps(
    config: PreTrainedConfig, dtype: str, weights: str, tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    settings = settings_of(tmp_path, config, dtype=dtype, weights=weights, lora_rank=4)
    counted = learner(settings, shapes(settings)).parts["activations"]
    assert counted == pytest.approx(kept_bytes(str(tmp_path), settings), rel=0.2)


def test_with_checkpointing_only_what_goes_into_blocks_and_one_block_are_kept(tmp_path: Path) -> None:
    whole, again = (
        settings_of(tmp_path, LLAMA, dtype="fp32", gradient_checkpointing=checkpointing)
        for checkpointing in (False, True)
    )
    model = shapes(whole)
    whole_bytes, again_bytes = (learner(each, model).parts["activations"] for each in (whole, again))
    assert again_bytes == whole_bytes / 4 + 4 * ROWS * (PROMPT + RESPONSE) * 64 * 4  # four blocks, in fp32


def test_units_of_mlps_are_found_whether_their_matrices_are_apart_or_joined_or_experts(tmp_path: Path) -> None:
    for config, inner, gated in (
        (GPT2, 4 * 256, False),
        (LLAMA, 4 * 2 * 160, True),
        (Phi3Config(**SIZES), 4 * 2 * 160, True),  # one matrix writes both
        (MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **SIZES), 4 * 2 * 2 * 160, True),
    ):
        (model,) = shapes(settings_of(tmp_path / config.model_type, config))
        assert (model.inner, model.gated) == (inner, gated), config.model_type
