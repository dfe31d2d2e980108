"""A model is rejected when it is loaded if the learner would compute something else than the model's own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from policies.learning.policy_model import PolicyModel
from policies.models import adapters, families
from policies.models.adapters import describe_family
from policies.models.model_check import ModelError
from tests.policies.models.test_families import save_model

DECODER = {"is_decoder": True}


def load(folder: Path, model_type: str, max_length: int | None = None, **values: Any) -> PolicyModel:
    return PolicyModel(save_model(folder, model_type, **values), dtype="fp32", critic=False, max_length=max_length)


@pytest.mark.parametrize(
    ("model_type", "values"),
    [("bert-generation", {}), ("gemma3_text", {"use_bidirectional_attention": True}), ("cpmant", {})],
)
def test_a_model_that_sees_later_tokens_is_rejected(tmp_path: Path, model_type: str, values: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"later tokens change .* by \S+ nats \(allowed: 0\.001\).* not a causal lang"):
        load(tmp_path, model_type, **values).check_forward()


@pytest.mark.parametrize("model_type", ["roberta", "roberta-prelayernorm", "xlm-roberta-xl", "data2vec-text"])
def test_a_model_whose_positions_start_after_the_padding_token_is_rejected(tmp_path: Path, model_type: str) -> None:
    with pytest.raises(
        ModelError, match=r"differ by 0\.\d+ nats .* own forward pass, whose positions do not start at 0"
    ):
        load(tmp_path, model_type, **DECODER).check_forward()


@pytest.mark.parametrize(
    ("model_type", "values"),
    [("bert", DECODER), ("bert-generation", DECODER), ("opt", {}), ("biogpt", {}), ("xglm", {}), ("bamba", {})],
)
def test_causal_models_with_offset_positions_or_without_attention_are_accepted(
    tmp_path: Path, model_type: str, values: dict[str, Any]
) -> None:
    load(tmp_path, model_type, **values).check_forward()


def test_gradient_checkpointing_does_not_impair_the_check(tmp_path: Path) -> None:
    path = save_model(tmp_path, "phi3")
    model = PolicyModel(path, dtype="fp32", critic=False, gradient_checkpointing=True).train()
    modes = [module.training for module in model.modules()]
    model.check_forward()
    assert [module.training for module in model.modules()] == modes and any(modes)


def test_a_model_that_rotates_all_rows_as_the_longest_is_rejected(tmp_path: Path) -> None:
    """Such as code of a model that is not in transformers; the check's rows are all short."""
    factors = {"short_factor": [1.0] * 16, "long_factor": [1.0 + 0.5 * index for index in range(16)]}
    model = load(tmp_path, "llama")
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors}
    config = model.lm.config
    config.rope_parameters, config.max_position_embeddings = rope, 256
    model.lm.model.rotary_emb = type(model.lm.model.rotary_emb)(config)
    model._max_length = 64
    model.check_forward()
    model._max_length = 65
    with pytest.raises(ModelError, match=r"batched with a longer one: .* or depends on the longest row"):
        model.check_forward()


def test_falcon_uses_eager_attention_when_the_run_does(tmp_path: Path) -> None:
    path = save_model(tmp_path, "falcon")
    model = PolicyModel(path, dtype="bf16", critic=False, max_length=64)
    for lm in (model.lm, model.reference()):
        assert lm.config._attn_implementation == "eager"
    model.check_forward()


def test_attention_that_was_not_compared_with_eager_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, llama = (save_model(tmp_path / name, name) for name in ("falcon", "llama"))
    assert "falcon: sdpa attention; LoRA" in describe_family(path, 80)  # measured with models built for each
    monkeypatch.setattr(adapters, "read_family_table", lambda: families.FamilyTable({}, {}))
    assert "falcon: sdpa attention, which cannot be compared with eager attention; LoRA" in describe_family(path, 80)
    assert "llama: sdpa attention; LoRA" in describe_family(llama, 80)
