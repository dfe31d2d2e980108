"""Rejection of weights that do not match their model, token ids beyond the tokenizer, and stop tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

from cory_env.tokenizer import DEFAULT_TOKENIZER
from policies.models.language_model import load_language_model, stop_token_ids
from policies.models.model_check import ModelError
from tests.policies.conftest import MakeCory


def copy_with(folder: Path, **changes: Any) -> Path:
    """A copy of the bundled model with changes to its config.json."""
    copy = Path(shutil.copytree(DEFAULT_TOKENIZER, folder / "model"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **changes}))
    return copy


def deeper_than_its_weights(folder: Path) -> Path:
    return copy_with(folder, n_layer=5)


def test_weights_with_missing_parameters_are_rejected_and_not_initialised_randomly(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="12 parameters are missing or have another shape"):
        load_language_model(str(deeper_than_its_weights(tmp_path)))


def test_weights_of_another_shape_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"have another shape, such as transformer\.wpe\.weight"):
        load_language_model(str(copy_with(tmp_path, n_positions=512)))


def test_an_unreadable_weight_file_is_rejected_in_one_line(tmp_path: Path) -> None:
    copy = copy_with(tmp_path)
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(b"x" * 1000)
    with pytest.raises(ModelError) as raised:
        load_language_model(str(copy))
    assert str(copy) in str(raised.value) and "\n" not in str(raised.value)


def test_token_ids_beyond_the_tokenizer_are_trainable_and_decode_to_nothing(
    make_cory: MakeCory, tmp_path: Path
) -> None:
    model = load_language_model(str(DEFAULT_TOKENIZER))
    assert isinstance(model, GPT2LMHeadModel)
    vocab_size = model.config.vocab_size
    model.resize_token_embeddings(vocab_size + 64)
    with torch.no_grad():  # all hidden states point in the direction of the new rows, so these are always sampled
        direction = torch.randn(model.config.n_embd, generator=torch.Generator().manual_seed(0))
        direction /= direction.norm()
        model.transformer.wte.weight[vocab_size:] = 10 * direction
        model.transformer.ln_f.bias += 3 * direction
    model.save_pretrained(tmp_path)
    for file in DEFAULT_TOKENIZER.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    report = make_cory(model=str(tmp_path), reward="tests.policies.sample_rewards:commas").train()["cory"]
    texts = [response["text"] for sample in report["samples"] for response in sample["responses"]]
    assert set(texts) == {""} and report["tokens"] == 8 * 2 * 6  # six tokens per response; none is a stop token
    assert report["logprob_diff_max"] < 1e-4


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": [0, 14]}, {"eos_token_id": 0}, [0, 14]),
        ({"eos_token_id": [0, 14]}, {"eos_token_id": None}, [0, 14]),
        ({"eos_token_id": [0, 14]}, {}, [0, 14]),
        ({"eos_token_id": [0, 14]}, None, [0, 14]),
        ({"eos_token_id": 0}, {"eos_token_id": [7, 0]}, [7, 0]),
        ({"eos_token_id": None}, {"eos_token_id": [7, 0]}, [7, 0]),
        ({"eos_token_id": None}, None, []),
        ({}, {"eos_token_id": 7}, [7]),  # the family's default is 50256
        ({}, None, [50256]),
    ],
)
def test_stop_tokens_are_collected_from_both_configuration_files(
    config: dict[str, Any], generation: dict[str, Any] | None, expected: list[int], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **config}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert stop_token_ids(str(tmp_path)) == expected


def test_stop_tokens_of_a_multimodal_model_include_those_of_its_text_config(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "eos_token_id": [1, 6], "text_config": {"eos_token_id": 9, "vocab_size": 64}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert stop_token_ids(str(tmp_path)) == [1, 6, 9]
