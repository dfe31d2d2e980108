"""Language models to measure with: random GPT-2s and Llamas of a given size, with the bundled tokenizer."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig

from cory_env.tokenizer import DEFAULT_TOKENIZER

POSITIONS = 1024


@dataclass(frozen=True)
class Shape:
    """A model's size; the embedding is tied to the head."""

    width: int
    layers: int
    heads: int
    vocabulary: int = 4096
    llama: int = 0
    """0: a GPT-2; else a Llama with this inner width, and a third of the heads for keys and values."""
    positions: int = POSITIONS

    def config(self) -> PreTrainedConfig:
        """As transformers describes it."""
        if self.llama:
            return LlamaConfig(
                vocab_size=self.vocabulary,
                max_position_embeddings=self.positions,
                hidden_size=self.width,
                intermediate_size=self.llama,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                num_key_value_heads=self.heads // 3,
                tie_word_embeddings=True,
                bos_token_id=0,
                eos_token_id=0,
            )
        return GPT2Config(
            vocab_size=self.vocabulary,
            n_positions=self.positions,
            n_embd=self.width,
            n_layer=self.layers,
            n_head=self.heads,
            activation_function="gelu_pytorch_tanh",  # one kernel, as in the bundled model
            bos_token_id=0,
            eos_token_id=0,
        )


SHAPES = {
    "test": Shape(64, 2, 2),
    "5M": Shape(256, 4, 4),  # 4.3 M parameters, the bundled model's shape
    "20M": Shape(448, 8, 7),  # 21 M
    "50M": Shape(640, 9, 10),  # 47 M
    "5M-50k": Shape(256, 4, 4, 50_257),  # the same layers under GPT-2's vocabulary: 16.2 M
    "5M-4k": Shape(256, 4, 4, positions=4608),
    "135M": Shape(576, 30, 9, 49_152, llama=1536),  # SmolLM2-135M's shape
    "360M": Shape(960, 32, 15, 49_152, llama=2560),  # SmolLM2-360M's shape
}


def make_model(name: str, folder: Path) -> str:
    """Writes the model `name` of `SHAPES` into a folder, once, and returns its path.

    Weights are random: the measurements do not depend on them, and a random model hardly ever ends a response early,
    so that both sides of a comparison generate the same number of tokens.
    """
    path = folder / name
    if not (path / "config.json").exists():
        shape = SHAPES[name]
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(shape.config()).save_pretrained(path)
        shutil.copy(DEFAULT_TOKENIZER / "tokenizer_config.json", path)
        (path / "tokenizer.json").write_text(_tokenizer(shape.vocabulary))
    return str(path)


def _tokenizer(vocabulary: int) -> str:
    """The bundled tokenizer, with made-up words up to the vocabulary that each decode and encode as one token."""
    content = json.loads((DEFAULT_TOKENIZER / "tokenizer.json").read_text())
    vocabulary_size = len(content["model"]["vocab"])
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
        for token in range(vocabulary_size, vocabulary)
    ]
    return json.dumps(content)
