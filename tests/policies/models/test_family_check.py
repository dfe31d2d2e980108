"""What is found out about a model's family before anything is started, and when its weights are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from benchmarks import tiny_models
from benchmarks.tiny_models import tiny_model
from policies.learning import policy_model
from policies.learning.policy_model import PolicyModel
from policies.models import families
from policies.models.adapters import adapted, linear_layers
from policies.models.families import engine_fault
from policies.models.family_check import check_family
from policies.models.language_model import empty_language_model, hollow_language_model, load_language_model
from policies.models.lora import Lora
from policies.models.model_check import ModelError
from policies.settings.settings import make_settings

HONOURING = ["gpt2", "llama", "gemma2", "opt", "falcon_h1"]
MORE = ["qwen2", "qwen3_moe", "gpt_neox", "mamba", "bloom", "gpt_oss", "glm4", "phi3", "gptj"]
CAPPED = ["gemma2", "vaultgemma"]


def save_config(folder: Path, model_type: str, **values: Any) -> str:
    """Writes a configuration of the family's usual size; no weights."""
    CONFIG_MAPPING[model_type](**values).save_pretrained(folder)
    return str(folder)


def save_model(folder: Path, model_type: str, **values: Any) -> str:
    """Writes a tiny random model."""
    model = tiny_model(CONFIG_MAPPING[model_type](**values))
    model.generation_config.eos_token_id = 0
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("model_type", [*HONOURING, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE)])
def test_a_family_that_honours_padding_passes(tmp_path: Path, model_type: str) -> None:
    family = check_family(save_config(tmp_path, model_type), "transformers")
    assert family.model_type == model_type
    assert family.padding is not None and family.padding < 1e-4
    assert family.attention == ("eager" if model_type in (*CAPPED, "bloom", "gpt_oss", "gptj", "mamba") else "sdpa")


@pytest.mark.parametrize("backend", ["vllm", "transformers"])
@pytest.mark.parametrize("model_type", ["rwkv", "recurrent_gemma"])
def test_a_family_that_ignores_padding_is_refused_by_name_and_no_backend_is_advised(
    tmp_path: Path, model_type: str, backend: str
) -> None:
    path = save_config(tmp_path, model_type)
    with pytest.raises(
        ModelError, match=rf"`{path}` is of the family {model_type}, whose code ignores padding"
    ) as told:
        check_family(path, backend)
    assert "backend" not in str(told.value)


def test_whoever_asks_for_the_size_of_a_vocabulary_has_the_family_checked(tmp_path: Path) -> None:
    path = save_config(tmp_path, "rwkv")
    settings = make_settings({"model": path, "self_test": False, "backend": "transformers"})
    with pytest.raises(ModelError, match="family rwkv, whose code ignores padding"):
        settings.vocab_size({"llm_1": [0], "llm_2": [0]}, "llm_1")


def test_a_model_that_ignores_padding_is_refused_by_its_own_weights_too(tmp_path: Path) -> None:
    PolicyModel(save_model(tmp_path / "llama", "llama"), dtype="fp32").check_forward()
    model = PolicyModel(save_model(tmp_path / "rwkv", "rwkv"), dtype="fp32")
    with pytest.raises(ModelError, match="ignores padding or positions"):
        model.check_forward()


@pytest.mark.parametrize("model_type", CAPPED)
def test_a_soft_cap_on_attention_gets_the_attention_that_has_it(tmp_path: Path, model_type: str) -> None:
    path = save_model(tmp_path, model_type)
    model = PolicyModel(path, dtype="fp32", longest=1000)
    makers = (empty_language_model, hollow_language_model, load_language_model)
    for lm in (model.lm, model.reference(), *(make(path) for make in makers)):
        assert lm.config._attn_implementation == "eager"
    model.check_forward()
    model.lm.set_attn_implementation("sdpa")
    with pytest.raises(ModelError, match="sdpa attention gives other log-probabilities than its definition"):
        model.check_forward()


def test_bf16_does_not_hide_what_a_family_outside_the_table_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = PolicyModel(save_model(tmp_path, "gemma2"), dtype="bf16", longest=1000)
    model.lm.set_attn_implementation("sdpa")
    model.check_forward()  # less than bf16's rounding
    monkeypatch.setattr(policy_model, "learner_row", lambda model_type: {})
    with pytest.raises(ModelError, match="sdpa attention gives other log-probabilities than its definition"):
        model.check_forward()
    assert model.dtype == torch.bfloat16


def test_the_attention_that_a_family_needs_is_known_by_its_soft_cap_or_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    capped = CONFIG_MAPPING["gemma2"]()
    monkeypatch.setattr(families, "read_table", lambda: families.Table({}, {}))
    assert families.needed_attention(capped) == "eager"
    monkeypatch.setattr(families, "read_table", lambda: families.Table({}, {"llama": {"attention_difference": 0.01}}))
    assert families.needed_attention(CONFIG_MAPPING["llama"]()) == "eager"
    assert families.needed_attention(CONFIG_MAPPING["gpt2"]()) is None


@pytest.mark.parametrize(
    ("model_type", "layer"), [("phimoe", "router"), ("falcon_h1", "out_proj"), ("mamba", "dt_proj")]
)
def test_layers_that_cannot_carry_an_adapter_are_no_default_and_refused_by_name(
    tmp_path: Path, model_type: str, layer: str
) -> None:
    model = tiny_model(CONFIG_MAPPING[model_type]()).requires_grad_(False)
    layers = linear_layers(model)
    assert layers and layer not in layers
    policy = adapted(model, Lora(4, 8.0))
    tokens = torch.arange(1, 9).reshape(1, 8)
    policy(tokens, use_cache=False).logits.sum().backward()
    adapters = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in adapters} == set(layers)
    assert all(weight.grad is not None for weight in adapters.values())
    path = save_config(tmp_path, model_type)
    with pytest.raises(ModelError, match=rf"`{path}`: its layers '{layer}' cannot carry a LoRA adapter: \w+ "):
        check_family(path, "transformers", lora=Lora(4, 8.0, (layers[0], layer)))
    with pytest.raises(ModelError, match=rf"has no linear layer 'no_such' to adapt. It has {layers[0]}"):
        check_family(path, "transformers", lora=Lora(4, 8.0, ("no_such",)))


def test_opt_whose_embeddings_are_narrower_than_its_layers_can_have_a_critic(tmp_path: Path) -> None:
    path = save_model(tmp_path, "opt", hidden_size=768, word_embed_proj_dim=384, do_layer_norm_before=False)
    model = PolicyModel(path, dtype="fp32")
    assert model.lm.config.word_embed_proj_dim < model.lm.config.hidden_size
    assert model.value_head.weight.shape == (1, model.lm.config.word_embed_proj_dim)
    model.check_forward()  # scores rows, values included


def test_the_table_is_of_many_families_and_says_what_was_measured_with_what() -> None:
    from benchmarks.families import FAMILIES

    table = families.read_table()
    assert len(FAMILIES) >= 25
    assert set(table.versions) == {"transformers", "vllm", "torch", "peft"} and all(table.versions.values())
    unmeasured = [name for name, row in table.families.items() if "error" in row or "vllm" not in row]
    assert not unmeasured


def test_the_table_s_figures_are_those_of_the_family_s_code() -> None:
    for model_type in ("gpt2", "gemma2"):
        config, row = CONFIG_MAPPING[model_type](), families.read_table().families[model_type]
        difference = tiny_models.attention_difference(config)
        assert difference is not None and (difference < families.LIMIT) == (
            row["attention_difference"] < families.LIMIT
        )
        assert tiny_models.padding_difference(tiny_model(config)) < families.LIMIT > row["padding"]


@pytest.mark.skipif(not families.engine_row("gpt2"), reason="the table is not of the installed vLLM")
def test_what_the_engine_cannot_do_with_a_family_is_refused_before_it_starts(tmp_path: Path) -> None:
    assert engine_fault("gpt2", lora=False) is None is engine_fault("gpt2", lora=True)
    path = save_config(tmp_path / "falcon", "falcon")
    assert check_family(path, "vllm").engine
    with pytest.raises(ModelError, match=r"family falcon: vLLM \S+ cannot adapt this family: .*Set weights=full or "):
        check_family(path, "vllm", lora=Lora(4, 8.0))
    check_family(path, "transformers", lora=Lora(4, 8.0))
    check_family(path, "vllm", "cuda", lora=Lora(4, 8.0))  # the table is of a CPU
    glm = save_config(tmp_path / "glm4", "glm4")
    assert "gate_up_proj" not in check_family(glm, "vllm", lora=Lora(4, 8.0)).lora_layers
    with pytest.raises(ModelError, match="cannot adapt the layers 'gate_up_proj'"):
        check_family(glm, "vllm", lora=Lora(4, 8.0, ("gate_up_proj",)))
    check_family(glm, "transformers", lora=Lora(4, 8.0, ("gate_up_proj",)))


def test_a_family_that_the_table_lacks_is_left_to_the_weight_sync_check(tmp_path: Path) -> None:
    assert "persimmon" not in families.read_table().families
    family = check_family(save_config(tmp_path, "persimmon"), "vllm")
    assert "decides at start" in family.engine and "padding is checked at start" in str(family)
