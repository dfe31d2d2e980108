"""Tells a model's files from others under the same name, in less time than it takes to read them.

Small files are read whole. Of a large file its size, its start and blocks are read: of safetensors one in the middle
of each tensor, of other files blocks all over it. What is not seen: a change to a few numbers of a large tensor, beside
its block.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
OTHERS = ("config.json", "generation_config.json", "*.py")
"""What else `from_pretrained` reads of a folder, beside the tokenizer."""
HUB, COMMIT = "hub", "commit"
"""The keys of a hub model's id and commit, where a folder has its files' names."""
SMALL = 16 * 2**20
"""Bytes of a file that are read in any case."""
BLOCK = 4096
"""Bytes that are read at each place beyond."""
MOST_BLOCKS = 1024
"""Of a file that is not of safetensors."""


def model_files(path: str) -> dict[str, str]:
    """Returns a digest of each file that decides what a model computes, by its name.

    Args:
        path: what `from_pretrained` is given: a folder, or a hub id. For that there is the id, under `HUB`, and under
            `COMMIT` the commit that the cache has.

    Raises:
        OSError: a file cannot be read.
    """
    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(path, "config.json")
        return {HUB: path, COMMIT: Path(file).parent.name if isinstance(file, str) else ""}
    files = sorted({file for pattern in (*WEIGHTS, *OTHERS) for file in folder.glob(pattern)})
    return {file.name: _digest(file) for file in files}


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    for part in _parts(file):
        digest.update(part)
    return digest.hexdigest()[:16]


def _parts(file: Path) -> Iterator[bytes]:
    """Yields what is looked at of a file: all of it, or of a large one its size, its start and blocks."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(SMALL)
        yield start
        if size > SMALL:
            yield str(size).encode()
            for offset in _block_offsets(start, size):
                opened.seek(offset)
                yield opened.read(BLOCK)


def _block_offsets(start: bytes, size: int) -> Iterable[int]:
    """Where blocks of a large file are read: in the middle of each tensor, or all over a file of another kind."""
    data = 8 + int.from_bytes(start[:8], "little")
    try:
        header = json.loads(start[8:data])
    except ValueError:
        return range(SMALL, size, max((size - SMALL) // MOST_BLOCKS, BLOCK))
    header.pop("__metadata__", None)
    return [max(data + sum(entry["data_offsets"]) // 2 - BLOCK // 2, 0) for entry in header.values()]
