"""What is wrong with a model's folder is found by every command that would use it, before anything is loaded."""

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


def copied(folder: Path) -> Path:
    return Path(shutil.copytree(DEFAULT_TOKENIZER, folder / "model"))


def encoder_decoder(folder: Path) -> Path:
    model = copied(folder)
    T5Config().save_pretrained(model)
    return model


def masked(folder: Path) -> Path:
    model = copied(folder)
    BertConfig(vocab_size=4096).save_pretrained(model)
    return model


def without_weights(folder: Path) -> Path:
    model = copied(folder)
    (model / "model.safetensors").unlink()
    return model


def cut_weights(folder: Path) -> Path:
    model = copied(folder)
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100_000])
    return model


def small_vocabulary(folder: Path) -> Path:
    model = copied(folder)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    return model


def nothing(folder: Path) -> Path:
    return folder / "nowhere"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (encoder_decoder, "(t5) is not a causal language model"),
        (masked, "(bert) is not a causal language model"),
        (without_weights, "holds no weights"),
        (cut_weights, "model.safetensors are damaged"),
        (nothing, "no such folder"),
    ],
)
def test_a_model_that_cannot_be_used_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[Path], Path],
    what: str,
    command: str,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    model = make(tmp_path)
    assert main([command, "imdb-tiny", f"model={model}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: ") and error.count("\n") == 1
    assert what in error and str(model) in error
    assert not (tmp_path / "runs").exists()


def test_a_prompt_with_a_token_beyond_the_embeddings_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    model = small_vocabulary(tmp_path)
    for command in ("train", "validate"):
        assert main([command, "imdb-tiny", f"model={model}"]) == 2
        told = capsys.readouterr()
        assert "with id" in told.out + told.err and f"`{model}` has 100 embeddings" in told.out + told.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_chat_template_that_cannot_be_used_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    model = copied(tmp_path)
    (model / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    assert main([command, "imdb-tiny", f"model={model}", "chat=true"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"Error: The chat template of {model} has no generation prompt") and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()
