"""Weights are written like `save_pretrained`, but file by file."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from launch.models.export import SHARD_BYTES, write_weights
from policies.models.language_model import load_language_model

LAYERS = 12
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def models() -> dict[str, PreTrainedModel]:
    """Models with and without tied weights, and of a family whose files have other tensors than the model."""
    torch.manual_seed(0)
    return {
        "GPT-2": GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=LAYERS, n_head=2)),
        "tied Llama": LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **SIZES)).to(torch.bfloat16),
        "Mixtral": MixtralForCausalLM(MixtralConfig(num_local_experts=3, **SIZES)),
    }


class CountingLoader:
    """Returns copies of a model's tensors and counts the bytes of the copies in memory."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.state = model.state_dict()
        self.current_bytes = self.peak_bytes = 0

    def __call__(self, name: str) -> torch.Tensor:
        tensor = self.state[name].clone()
        self.current_bytes += tensor.nbytes
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        weakref.finalize(tensor.untyped_storage(), self._release, tensor.nbytes)
        return tensor

    def _release(self, size: int) -> None:
        self.current_bytes -= size


@pytest.mark.parametrize("kind", ["GPT-2", "tied Llama", "Mixtral"])
@pytest.mark.parametrize("shard_bytes", [SHARD_BYTES, 20_000])
def test_weights_equal_those_of_save_pretrained_with_at_most_one_file_in_memory(
    tmp_path: Path, kind: str, shard_bytes: int
) -> None:
    models()[kind].save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "expected")
    meta_model = load_language_model(str(tmp_path / "base"), device="meta").to(torch.bfloat16)
    loader = CountingLoader(model)
    (tmp_path / "out").mkdir()
    write_weights(meta_model, loader, tmp_path / "out", shard_bytes)
    meta_model.config.save_pretrained(tmp_path / "out")
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert state.keys() == loader.state.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in loader.state.items())
    files = list((tmp_path / "out").glob("*.safetensors"))
    if shard_bytes == SHARD_BYTES:
        assert [file.read_bytes() for file in files] == [(tmp_path / "expected" / "model.safetensors").read_bytes()]
        return
    layer_bytes = sum(tensor.nbytes for name, tensor in loader.state.items() if ".3." in name)
    total_bytes = sum(tensor.nbytes for tensor in loader.state.values())
    for file in files:
        assert sum(tensor.nbytes for tensor in load_file(file).values()) <= max(20_000, layer_bytes)
    assert len(files) > 2 and loader.peak_bytes <= max(20_000, layer_bytes) < total_bytes / 2
