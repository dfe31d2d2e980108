"""Writing a finished model or folder: weights in half the space, folders swapped in whole."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Gives an empty folder to fill; it takes the place of `target` when the block ends, and vanishes if that fails.

    Readers see the old folder or the new one, never half of one.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as stage:
        fresh, stale = Path(stage, "fresh"), Path(stage, "stale")
        fresh.mkdir()
        yield fresh
        for path in fresh.iterdir():
            path.chmod(0o644)  # safetensors makes files that only their owner can read
        if target.exists():
            target.rename(stale)
        fresh.rename(target)


def size_mb(folder: Path) -> float:
    """Returns the size of everything below `folder` in megabytes (10^6 bytes)."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def save_tokenizer(tokenizer: "PreTrainedTokenizerFast", folder: Path) -> None:
    """Saves a tokenizer without the limit and padding of its last call, which readers of its file alone would apply."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    tokenizer.save_pretrained(folder)


def save_half(model: "PreTrainedModel", folder: Path) -> None:
    """Saves a float32 model with float16 weights, under a config that has them loaded as float32 again."""
    model.half().save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n")
