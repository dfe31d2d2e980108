"""Saves models and folders: float16 weights, and atomic replacement of folders."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


@contextmanager
def replace_folder(target: Path) -> Iterator[Path]:
    """Yields an empty folder that atomically replaces `target` when the block ends; deletes it if the block fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as stage:
        new_folder, old_folder = Path(stage, "fresh"), Path(stage, "stale")
        new_folder.mkdir()
        yield new_folder
        for path in new_folder.iterdir():
            path.chmod(0o644)  # safetensors makes files that only their owner can read
        if target.exists():
            target.rename(old_folder)
        new_folder.rename(target)


def size_mb(folder: Path) -> float:
    """Returns the size of all files in `folder` in megabytes (10^6 bytes)."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def save_tokenizer(tokenizer: "PreTrainedTokenizerFast", folder: Path) -> None:
    """Saves a tokenizer without the truncation and padding of its last call, which `tokenizers` would apply."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    tokenizer.save_pretrained(folder)


def save_half(model: "PreTrainedModel", folder: Path) -> None:
    """Saves a float32 model with float16 weights and a config that loads them as float32."""
    model.half().save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n")
