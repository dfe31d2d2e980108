"""Checks of a model's family, before a run starts and when its weights are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from benchmarks import tiny_models
from benchmarks.tiny_models import tiny_model
from policies.learning.policy_model import PolicyModel
from policies.models import families
from policies.models.adapters import add_lora, describe_family, linear_layers
from policies.models.language_model import init_empty, load_language_model, meta_model
from policies.models.lora import Lora
from policies.models.model_check import ModelError, check_model

CAPPED = ["gemma2", "vaultgemma"]


def save_model(folder: Path, model_type: str, **values: Any) -> str:
    """Writes a tiny random model."""
    model = tiny_model(CONFIG_MAPPING[model_type](**values))
    model.generation_config.eos_token_id = 0
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("model_type", ["rwkv", "recurrent_gemma"])
def test_a_family_that_ignores_padding_is_rejected_before_loading_weights(tmp_path: Path, model_type: str) -> None:
    CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"`{tmp_path}` is of the family {model_type}, whose code ignores padding"):
        check_model(str(tmp_path), 80)


@pytest.mark.parametrize("model_type", ["bert", "xlm"])  # XLM's configuration has no `is_decoder`
def test_an_encoder_is_rejected_before_loading_weights(tmp_path: Path, model_type: str) -> None:
    CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"`{tmp_path}` \({model_type}\) is not a causal language model"):
        check_model(str(tmp_path), 80)


def test_check_forward_rejects_a_model_that_ignores_padding(tmp_path: Path) -> None:
    PolicyModel(save_model(tmp_path / "llama", "llama"), dtype="fp32").check_forward()
    model = PolicyModel(save_model(tmp_path / "rwkv", "rwkv"), dtype="fp32")
    with pytest.raises(ModelError, match="ignores padding or positions"):
        model.check_forward()


@pytest.mark.parametrize("model_type", CAPPED)
def test_a_model_with_a_soft_cap_gets_eager_attention(tmp_path: Path, model_type: str) -> None:
    path = save_model(tmp_path, model_type)
    model = PolicyModel(path, dtype="fp32", max_length=1000)
    makers = (meta_model, init_empty, load_language_model)
    for lm in (model.lm, model.reference(), *(make(path) for make in makers)):
        assert lm.config._attn_implementation == "eager"
    model.check_forward()
    model.lm.set_attn_implementation("sdpa")
    with pytest.raises(ModelError, match="log-probabilities with sdpa attention differ"):
        model.check_forward()


def test_bf16_rounding_does_not_hide_a_missing_soft_cap(tmp_path: Path) -> None:
    model = PolicyModel(save_model(tmp_path, "gemma2"), dtype="bf16", max_length=1000)
    model.lm.set_attn_implementation("sdpa")  # differs by less than bf16 rounding
    with pytest.raises(ModelError, match="log-probabilities with sdpa attention differ"):
        model.check_forward()
    assert model.dtype == torch.bfloat16


def test_the_needed_attention_follows_from_the_soft_cap_or_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    capped = CONFIG_MAPPING["gemma2"]()
    monkeypatch.setattr(families, "read_family_table", lambda: families.FamilyTable({}, {}))
    assert families.needed_attention(capped) == "eager"
    monkeypatch.setattr(
        families, "read_family_table", lambda: families.FamilyTable({}, {"llama": {"attention_difference": 0.01}})
    )
    assert families.needed_attention(CONFIG_MAPPING["llama"]()) == "eager"
    assert families.needed_attention(CONFIG_MAPPING["gpt2"]()) is None


@pytest.mark.parametrize(
    ("model_type", "layer"), [("phimoe", "router"), ("falcon_h1", "out_proj"), ("mamba", "dt_proj")]
)
def test_layers_that_cannot_be_adapted_are_not_defaults_and_are_rejected_by_name(
    tmp_path: Path, model_type: str, layer: str
) -> None:
    model = tiny_model(CONFIG_MAPPING[model_type]()).requires_grad_(False)
    layers = linear_layers(model)
    assert layers and layer not in layers
    policy = add_lora(model, Lora(4, 8.0))
    tokens = torch.arange(1, 9).reshape(1, 8)
    policy(tokens, use_cache=False).logits.sum().backward()
    adapters = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in adapters} == set(layers)
    assert all(weight.grad is not None for weight in adapters.values())
    for name in (layer, "no_such"):
        with pytest.raises(ModelError, match=rf"no linear layer '{name}' to adapt. It has "):
            add_lora(model, Lora(4, 8.0, (layers[0], name)))


def test_opt_with_embeddings_narrower_than_its_layers_can_have_a_critic(tmp_path: Path) -> None:
    path = save_model(tmp_path, "opt", hidden_size=768, word_embed_proj_dim=384, do_layer_norm_before=False)
    model = PolicyModel(path, dtype="fp32")
    assert model.lm.config.word_embed_proj_dim < model.lm.config.hidden_size
    assert model.value_head.weight.shape == (1, model.lm.config.word_embed_proj_dim)
    model.check_forward()  # also computes values


def test_the_table_has_many_families_and_the_versions_they_were_measured_with() -> None:
    from benchmarks.families import FAMILIES

    table = families.read_family_table()
    assert len(FAMILIES) >= 25
    assert set(table.versions) == {"transformers", "vllm", "torch", "peft"} and all(table.versions.values())
    unmeasured = [name for name, row in table.families.items() if "error" in row or "vllm" not in row]
    assert not unmeasured


def test_the_table_agrees_with_measurements_of_the_installed_code() -> None:
    for model_type in ("gpt2", "gemma2"):
        config, row = CONFIG_MAPPING[model_type](), families.read_family_table().families[model_type]
        difference = tiny_models.attention_difference(config)
        assert difference is not None and (difference < families.LOGPROB_TOLERANCE) == (
            row["attention_difference"] < families.LOGPROB_TOLERANCE
        )
        assert tiny_models.padding_difference(tiny_model(config)) < families.LOGPROB_TOLERANCE > row["padding"]


def test_a_layer_that_vllm_cannot_adapt_is_not_a_default(tmp_path: Path) -> None:
    CONFIG_MAPPING["glm4"]().save_pretrained(tmp_path)
    assert "gate_up_proj" not in describe_family(str(tmp_path), 80)
    assert "glm4: sdpa attention; LoRA on down_proj, k_proj, " in describe_family(str(tmp_path), 80)


def test_the_error_for_a_model_with_custom_code_names_the_setting(tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "custom", "auto_map": auto_map}))
    with pytest.raises(ModelError, match=r"contains Python code\. If you trust it, set trust_remote_code=true\."):
        load_language_model(str(tmp_path))
