"""Every command rejects an invalid model folder before anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import BertConfig, T5Config

from cory_env.tokenizer import DEFAULT_TOKENIZER
from launch.main import main

COMMANDS = ("plan", "train", "validate")


def copy_model(folder: Path) -> Path:
    return Path(shutil.copytree(DEFAULT_TOKENIZER, folder / "model"))


def encoder_decoder(folder: Path) -> Path:
    model = copy_model(folder)
    T5Config().save_pretrained(model)
    return model


def masked_model(folder: Path) -> Path:
    model = copy_model(folder)
    BertConfig(vocab_size=4096).save_pretrained(model)
    return model


def without_weights(folder: Path) -> Path:
    model = copy_model(folder)
    (model / "model.safetensors").unlink()
    return model


def cut_weights(folder: Path) -> Path:
    model = copy_model(folder)
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100_000])
    return model


def small_vocabulary(folder: Path) -> Path:
    model = copy_model(folder)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    return model


def missing_folder(folder: Path) -> Path:
    return folder / "nowhere"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (encoder_decoder, "(t5) is not a causal language model"),
        (masked_model, "(bert) is not a causal language model"),
        (without_weights, "holds no weights"),
        (cut_weights, "model.safetensors are damaged"),
        (missing_folder, "no such folder"),
    ],
)
def test_an_unusable_model_is_reported_in_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[Path], Path],
    message: str,
    command: str,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    model = make(tmp_path)
    assert main([command, "imdb-tiny", f"model={model}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: ") and error.count("\n") == 1
    assert message in error and str(model) in error
    assert not (tmp_path / "runs").exists()


def test_a_prompt_token_beyond_the_embeddings_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    model = small_vocabulary(tmp_path)
    for command in ("train", "validate"):
        assert main([command, "imdb-tiny", f"model={model}"]) == 2
        captured = capsys.readouterr()
        output = captured.out + captured.err
        assert "with id" in output and f"`{model}` has only 100 embeddings" in output
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unusable_chat_template_is_reported_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    model = copy_model(tmp_path)
    (model / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    assert main([command, "imdb-tiny", f"model={model}", "chat=true"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"Error: The chat template of {model} has no generation prompt") and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()
