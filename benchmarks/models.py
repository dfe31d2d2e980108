"""Language models to measure with: random GPT-2s of a given size, with the bundled tokenizer."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from cory_env.tokenizer import DEFAULT_TOKENIZER

POSITIONS = 512


@dataclass(frozen=True)
class Shape:
    """A GPT-2's size; the embedding is tied to the head."""

    width: int
    layers: int
    heads: int
    vocabulary: int = 4096


SHAPES = {
    "test": Shape(64, 2, 2),
    "5M": Shape(256, 4, 4),  # 4.3 M parameters, the bundled model's shape
    "50M": Shape(640, 9, 10),  # 47 M
    "5M-50k": Shape(256, 4, 4, 50_257),  # the same layers under GPT-2's vocabulary: 16.2 M
}


def make_model(name: str, folder: Path) -> str:
    """Writes the model `name` of `SHAPES` into a folder, once, and returns its path.

    Weights are random: what is measured does not depend on them, and a random model hardly ever ends a response early,
    so that both sides of a comparison generate the same number of tokens.
    """
    path = folder / name
    if not (path / "config.json").exists():
        shape = SHAPES[name]
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=shape.vocabulary,
            n_positions=POSITIONS,
            n_embd=shape.width,
            n_layer=shape.layers,
            n_head=shape.heads,
            activation_function="gelu_pytorch_tanh",  # one kernel, as in the bundled model
            bos_token_id=0,
            eos_token_id=0,
        )
        GPT2LMHeadModel(config).save_pretrained(path)
        shutil.copy(DEFAULT_TOKENIZER / "tokenizer_config.json", path)
        (path / "tokenizer.json").write_text(_tokenizer(shape.vocabulary))
    return str(path)


def _tokenizer(vocabulary: int) -> str:
    """The bundled tokenizer, with made-up words up to the vocabulary that each decode and encode as one token."""
    content = json.loads((DEFAULT_TOKENIZER / "tokenizer.json").read_text())
    known = len(content["model"]["vocab"])
    content["added_tokens"] += [
        {
            "id": token,
            "content": f" ~{token}",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": False,
        }
        for token in range(known, vocabulary)
    ]
    return json.dumps(content)
