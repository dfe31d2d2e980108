"""What a forward pass keeps, counted without values, against what one with values keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, PreTrainedConfig

from policies.models.adapters import adapted
from policies.models.language_model import (
    eager_is_faster,
    empty_language_model,
    load_language_model,
    store_matrices,
)
from policies.models.lora import Lora
from policies.settings.activations import RULE, Kept, kept

ROWS, LENGTH = 3, 10
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = LlamaConfig(vocab_size=64, num_key_value_heads=2, bos_token_id=1, eos_token_id=2, **SIZES)
GPT2 = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2)


def measured(path: str, computed: torch.dtype, lora: Lora | None) -> float:
    model = load_language_model(path)
    model = adapted(model.requires_grad_(False), lora) if lora else model
    if computed == torch.bfloat16:
        store_matrices(model, computed)
    if eager_is_faster(computed, torch.device("cpu"), LENGTH):
        model.set_attn_implementation("eager")
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    found: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    mask = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    mask[0, :4] = 0
    with (
        saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=computed == torch.bfloat16),
    ):
        model(input_ids=mask, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), use_cache=False)
    return float(sum(tensor.untyped_storage().nbytes() for tensor in found.values()))


def counted(
    path: Path, config: PreTrainedConfig, computed: torch.dtype = torch.float32, lora: Lora | None = None
) -> Kept:
    config.save_pretrained(path)
    return kept(empty_language_model(str(path)), ROWS, LENGTH, computed, lora=lora, cast=False, plain=True)


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lora", [None, Lora(4, 8.0)], ids=["full", "lora"])
def test_what_is_counted_is_what_is_kept(
    config: PreTrainedConfig, computed: torch.dtype, lora: Lora | None, tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    found = counted(tmp_path, config, computed, lora)
    assert found.whole == pytest.approx(measured(str(tmp_path), computed, lora), rel=0.02)
    assert found.inputs == 2 * ROWS * LENGTH * 32 * 4  # what goes from block to block stays in fp32
    assert 0.3 * found.whole < found.block <= 0.5 * found.whole


def test_where_a_family_depends_on_values_a_rule_of_thumb_counts(tmp_path: Path) -> None:
    config = MixtralConfig(vocab_size=64, num_key_value_heads=2, num_local_experts=4, **SIZES)
    assert counted(tmp_path, config, torch.float32).whole == RULE * 2 * ROWS * LENGTH * 32 * 2.0
