"""Tells a model's files from others under the same name, in less time than it takes to read them.

Small files are read whole. Of a large file of safetensors its size, its header (name, type, shape and place of every
tensor) and a block in the middle of each tensor are read, of `MOST_TENSORS` at most; of one in PyTorch's format the
list of its parts, which has a checksum of each. What is not seen: a change to a few numbers of a large tensor, beside
the block that is read.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
OTHERS = ("config.json", "generation_config.json", "*.py")
"""What else `from_pretrained` reads of a folder, beside the tokenizer."""
HUB, COMMIT = "hub", "commit"
"""The keys of a hub model's id and commit, where a folder has its files' names."""
SMALL = 16 * 2**20
"""Bytes of a file that is read whole."""
BLOCK = 4096
"""Bytes that are read of each tensor."""
MOST_TENSORS = 1024
"""Tensors of a file of which a block is read; of more, evenly spaced ones."""


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
    """Yields what is looked at of a file."""
    size = file.stat().st_size
    if size <= SMALL:
        yield file.read_bytes()
        return
    yield str(size).encode()
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            for part in archive.infolist():
                yield repr((part.filename, part.file_size, part.CRC)).encode()
        return
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = opened.read(min(length, size))
        yield header
        try:
            tensors = [entry["data_offsets"] for entry in json.loads(header).values() if "dtype" in entry]
            middles = sorted(8 + length + (start + end) // 2 for start, end in tensors)
        except (ValueError, LookupError, TypeError, AttributeError):  # no safetensors: blocks of the file itself
            middles = list(range(0, size, max(size // MOST_TENSORS, BLOCK)))
        for middle in middles[:: -(-len(middles) // MOST_TENSORS) or 1]:
            opened.seek(max(middle - BLOCK // 2, 0))
            yield opened.read(BLOCK)
