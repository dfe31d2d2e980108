"""Weights are written as `save_pretrained` writes them, but file by file."""

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
    """One of each kind: tied or not, and of a family whose files hold other tensors than the model has."""
    torch.manual_seed(0)
    return {
        "GPT-2": GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=LAYERS, n_head=2)),
        "tied Llama": LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **SIZES)).to(torch.bfloat16),
        "Mixtral": MixtralForCausalLM(MixtralConfig(num_local_experts=3, **SIZES)),
    }


class Watched:
    """Gives copies of a model's tensors, and counts the bytes of those that are still held."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.state = model.state_dict()
        self.held = self.most = 0

    def __call__(self, name: str) -> torch.Tensor:
        tensor = self.state[name].clone()
        self.held += tensor.nbytes
        self.most = max(self.most, self.held)
        weakref.finalize(tensor.untyped_storage(), self._let_go, tensor.nbytes)
        return tensor

    def _let_go(self, size: int) -> None:
        self.held -= size


@pytest.mark.parametrize("kind", ["GPT-2", "tied Llama", "Mixtral"])
@pytest.mark.parametrize("shard_bytes", [SHARD_BYTES, 20_000])
def test_weights_are_those_of_save_pretrained_and_no_more_than_a_file_of_them_is_held(
    tmp_path: Path, kind: str, shard_bytes: int
) -> None:
    models()[kind].save_pretrained(tmp_path / "base")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).to(torch.bfloat16)
    whole.save_pretrained(tmp_path / "whole")
    hollow, watched = load_language_model(str(tmp_path / "base"), device="meta").to(torch.bfloat16), Watched(whole)
    (tmp_path / "found").mkdir()
    write_weights(hollow, watched, tmp_path / "found", shard_bytes)
    hollow.config.save_pretrained(tmp_path / "found")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "found").state_dict()
    assert found.keys() == watched.state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in watched.state.items())
    files = list((tmp_path / "found").glob("*.safetensors"))
    if shard_bytes == SHARD_BYTES:
        assert [file.read_bytes() for file in files] == [(tmp_path / "whole" / "model.safetensors").read_bytes()]
        return
    layer = sum(tensor.nbytes for name, tensor in watched.state.items() if ".3." in name)
    for file in files:
        assert sum(tensor.nbytes for tensor in load_file(file).values()) <= max(20_000, layer)
    assert len(files) > 2 and watched.most <= max(20_000, layer) < sum(x.nbytes for x in watched.state.values()) / 2
