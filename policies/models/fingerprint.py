"""Fingerprints of a model's files, which detect changed files without reading all of their content.

Small files are read completely. For a large file, the digest covers its size, its start and sampled blocks: one in the
middle of each tensor for safetensors, evenly spaced ones otherwise. A change to a few numbers of a large tensor outside
its block goes undetected.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from policies.models.revision import split_revision

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
CONFIG_AND_CODE_FILES = ("config.json", "generation_config.json", "*.py")
"""The other files that `from_pretrained` reads from a folder, besides the tokenizer."""
HUB_KEY, COMMIT_KEY = "hub", "commit"  # keys of a hub model's id and commit
SMALL_FILE_BYTES = 16 * 2**20  # bytes at the start of a file that are always read
BLOCK_BYTES = 4096  # size of each sampled block after that
MAX_BLOCKS = 1024  # maximal number of sampled blocks of a file that is not safetensors


def model_files(path: str) -> dict[str, str]:
    """Returns a digest of each weight, configuration and code file of a model.

    Returns:
        For a folder, digests by file name; for a hub id, the id under `HUB_KEY` and the cached commit under
        `COMMIT_KEY`.
    """
    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        hub_id, revision = split_revision(path)
        file = try_to_load_from_cache(hub_id, "config.json", **revision)
        return {HUB_KEY: hub_id, COMMIT_KEY: Path(file).parent.name if isinstance(file, str) else ""}
    files = sorted({file for pattern in (*WEIGHT_FILES, *CONFIG_AND_CODE_FILES) for file in folder.glob(pattern)})
    return {file.name: _digest(file) for file in files}


def _digest(file: Path) -> str:
    """Returns a digest of all of a small file, or of start, size and blocks of a large one."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(SMALL_FILE_BYTES)
        digest = hashlib.sha256(start)
        if size > SMALL_FILE_BYTES:
            digest.update(str(size).encode())
            for offset in _block_offsets(start, size):
                stream.seek(offset)
                digest.update(stream.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]


def _block_offsets(start: bytes, size: int) -> Iterable[int]:
    """Offsets of the sampled blocks: in the middle of each tensor for safetensors, evenly spaced otherwise."""
    data = 8 + int.from_bytes(start[:8], "little")
    try:
        header = json.loads(start[8:data])
    except ValueError:
        return range(SMALL_FILE_BYTES, size, max((size - SMALL_FILE_BYTES) // MAX_BLOCKS, BLOCK_BYTES))
    header.pop("__metadata__", None)
    return [max(data + sum(entry["data_offsets"]) // 2 - BLOCK_BYTES // 2, 0) for entry in header.values()]
