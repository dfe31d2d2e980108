"""A policy's weights as they are sent from learners to engines, and their checksums."""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

Weights = Mapping[str, np.ndarray]  # fp32 arrays by Hugging Face parameter name; tied weights appear once
Shape = tuple[int, ...]


class LazyWeights(Mapping[str, np.ndarray]):
    """Weights that are computed on access and not cached, so that only one is in memory at a time."""

    def __init__(self, shapes: Mapping[str, Shape], make: Callable[[str], np.ndarray]) -> None:
        """Creates the mapping."""
        self.shapes = shapes
        self._make = make

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.shapes:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def weight_shapes(weights: Weights) -> Mapping[str, Shape]:
    """The shapes of weights, by name; `LazyWeights` are not computed for that."""
    return (
        weights.shapes if isinstance(weights, LazyWeights) else {name: array.shape for name, array in weights.items()}
    )


def checksum(weights: Weights) -> int:
    """CRC-32 over names and fp32 values, in sorted order of the names."""
    total = 0
    for name in sorted(weights):
        total = extend_checksum(total, name, weights[name])
    return total


def extend_checksum(total: int, name: str, array: np.ndarray) -> int:
    """Extends a `checksum` by one array, whose name must sort after those of the others."""
    return zlib.crc32(np.ascontiguousarray(array, dtype=np.float32).data, zlib.crc32(name.encode(), total))


class Digest:
    """A checksum of a sequence of tensors of any type, computed on each tensor's device without copying it.

    The value is the same on all kinds of devices. On a GPU, `add` may be called from several CUDA streams, as in vLLM:
    its kernels on one stream do not depend on those on another.
    """

    _PART = 1 << 22

    def __init__(self) -> None:
        self._names = 0
        self._bits: list[Tensor] = []  # a number per tensor, on its device

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds the next tensor."""
        self._names = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), self._names)
        bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
        positions = torch.arange(1, min(len(bits), self._PART) + 1, device=bits.device)
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        for part in bits.split(self._PART):
            total = total * 1_000_003 + (part * positions[: len(part)]).sum()  # modulo 2^64
        self._bits.append(total)

    def value(self) -> int:
        """The checksum of all tensors so far; synchronizes the GPU."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return zlib.crc32(str([int(bits) for bits in self._bits]).encode(), self._names)


_INTEGERS = {2: torch.int16, 4: torch.int32}


@contextmanager
def shared_memory_file(weights: Weights) -> Iterator[str]:
    """Yields the path of an anonymous file in memory (memfd) for `torch.load`. It disappears even if we are killed."""
    descriptor = os.memfd_create("weights")
    try:
        with open(descriptor, "wb", closefd=False) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # arrays from Ray's object store are read-only
            torch.save({name: torch.from_numpy(array) for name, array in weights.items()}, file)
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)
