"""A policy's weights on their way from learner to engine."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from safetensors.numpy import save
from torch import Tensor

Weights = Mapping[str, np.ndarray]
"""fp32 arrays by Hugging Face parameter name; tied weights appear once."""
Shape = tuple[int, ...]


class LazyWeights(Mapping[str, np.ndarray]):
    """Weights of which each is made when it is asked for, and not kept: so one at a time is in memory."""

    def __init__(self, shapes: Mapping[str, Shape], make: Callable[[str], np.ndarray]) -> None:
        """Takes the shapes, by name, and what makes an array of a name, which nobody else may write to."""
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


def shapes(weights: Weights) -> Mapping[str, Shape]:
    """The shapes of weights, by name; of lazy ones without making any."""
    return (
        weights.shapes if isinstance(weights, LazyWeights) else {name: array.shape for name, array in weights.items()}
    )


def checksum(weights: Weights) -> int:
    """CRC-32 over names and fp32 values, in sorted order of the names."""
    total = 0
    for name in sorted(weights):
        total = extend(total, name, weights[name])
    return total


def extend(total: int, name: str, array: np.ndarray) -> int:
    """The checksum of weights with one more, whose name is after those of the others."""
    return zlib.crc32(np.ascontiguousarray(array, dtype=np.float32).data, zlib.crc32(name.encode(), total))


class Digest:
    """A checksum of tensors in the order they pass by, of any type, each on its own device: none is copied to another.

    Two sides that pass the same tensors by devices of different kinds get the same number. On a GPU, tensors may pass
    by on several CUDA streams at a time, as vLLM's do: what `add` computes on one depends on nothing that another does.
    """

    _PART = 1 << 22

    def __init__(self) -> None:
        self._names = 0
        self._bits: list[Tensor] = []  # a number per tensor, on its device

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes the next one."""
        self._names = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), self._names)
        bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
        places = torch.arange(1, min(len(bits), self._PART) + 1, device=bits.device)
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        for part in bits.split(self._PART):
            total = total * 1_000_003 + (part * places[: len(part)]).sum()  # modulo 2^64
        self._bits.append(total)

    def value(self) -> int:
        """The checksum of all so far. It waits for what GPUs have yet to do."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return zlib.crc32(str([int(bits) for bits in self._bits]).encode(), self._names)


_INTEGERS = {2: torch.int16, 4: torch.int32}


@contextmanager
def in_shared_memory(weights: Weights) -> Iterator[str]:
    """Yields the path of a safetensors file in memory that has no name of its own: a kill cannot leave it behind."""
    descriptor = os.memfd_create("weights")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(save(dict(weights)))
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)
