"""Weights that are not the model's are refused, and ids beyond the tokenizer are harmless."""

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
    """A copy of the bundled model whose config.json says something else."""
    copy = Path(shutil.copytree(DEFAULT_TOKENIZER, folder / "model"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **changes}))
    return copy


def deeper_than_its_weights(folder: Path) -> Path:
    return copy_with(folder, n_layer=5)


def test_weights_that_lack_a_parameter_are_refused_and_not_filled_with_random_numbers(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="12 parameters are missing or of another shape"):
        load_language_model(str(deeper_than_its_weights(tmp_path)))


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"of another shape, such as transformer\.wpe\.weight"):
        load_language_model(str(copy_with(tmp_path, n_positions=512)))


def test_weights_that_are_no_weights_are_refused_in_one_line(tmp_path: Path) -> None:
    copy = copy_with(tmp_path)
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(b"x" * 1000)
    with pytest.raises(ModelError) as raised:
        load_language_model(str(copy))
    assert str(copy) in str(raised.value) and "\n" not in str(raised.value)


def test_ids_beyond_the_tokenizer_are_trained_on_and_shown_as_nothing(make_cory: MakeCory, tmp_path: Path) -> None:
    model = load_language_model(str(DEFAULT_TOKENIZER))
    assert isinstance(model, GPT2LMHeadModel)
    known = model.config.vocab_size
    model.resize_token_embeddings(known + 64)
    with torch.no_grad():  # one direction that only the new rows point to, and that every hidden state has
        towards = torch.randn(model.config.n_embd, generator=torch.Generator().manual_seed(0))
        towards /= towards.norm()
        model.transformer.wte.weight[known:] = 10 * towards
        model.transformer.ln_f.bias += 3 * towards
    model.save_pretrained(tmp_path)
    for file in DEFAULT_TOKENIZER.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    report = make_cory(model=str(tmp_path), reward="tests.policies.sample_rewards:commas").train()["cory"]
    texts = [response["text"] for sample in report["samples"] for response in sample["responses"]]
    assert set(texts) == {""} and report["tokens"] == 8 * 2 * 6  # all six tokens of each, none of them the end
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
        ({}, {"eos_token_id": 7}, [7]),  # its family's default is 50256
        ({}, None, [50256]),
    ],
)
def test_the_ends_that_a_model_names_are_those_of_both_of_its_files(
    config: dict[str, Any], generation: dict[str, Any] | None, expected: list[int], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **config}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert stop_token_ids(str(tmp_path)) == expected


def test_the_ends_of_a_model_with_more_than_text_stand_in_its_text_s_part(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "eos_token_id": [1, 6], "text_config": {"eos_token_id": 9, "vocab_size": 64}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert stop_token_ids(str(tmp_path)) == [1, 6, 9]
