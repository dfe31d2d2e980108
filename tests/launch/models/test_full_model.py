"""Exported full models of families with tied weights, and of one whose files have other tensors than the model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from launch.models.export import full_model
from launch.models.trained import PolicySet
from tests.paper import paper_settings

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    "base",
    [
        LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **SIZES)),
        MixtralForCausalLM(MixtralConfig(num_local_experts=3, **SIZES)),
    ],
    ids=["tied", "Mixtral"],
)
def test_an_exported_policy_is_loaded_with_its_trained_weights(tmp_path: Path, base: PreTrainedModel) -> None:
    base.save_pretrained(tmp_path / "base")
    weights = {name: parameter.detach().numpy() + 1 for name, parameter in base.named_parameters()}
    settings = paper_settings(model=str(tmp_path / "base"), num_agents=1)
    trained = PolicySet(settings, 1, [], ("llm_1",), "run", "run", "", lambda _: weights)
    full_model(trained, "llm_1", torch.float32).save_pretrained(tmp_path / "out")
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], torch.tensor(array)) for name, array in weights.items())
