"""Storage of a policy's trained weights and Adam's moments: a folder with one safetensors file per learner process.

The files are torch distributed checkpoints (DCP) in Hugging Face format. Their headers record which part of a tensor a
file holds, so any number of processes can read what any other number wrote. They contain no code.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from policies.learning.offloaded_adam import MOMENTS, OffloadedAdamW, init_adam_state
from policies.models.weights import LazyWeights

TENSOR_FILES = "*.safetensors"


class StoredPolicyError(ValueError):
    """A stored policy does not fit this run; the message names the difference and the settings that decide it."""


warnings.filterwarnings("ignore", "torch.distributed is disabled")  # expected in a single process


def save(tensors: Mapping[str, Tensor], folder: str, group: dist.ProcessGroup | None) -> None:
    """Writes tensors into a folder; all processes of the group must call it.

    Args:
        tensors: by name; each process writes its shards of sharded tensors.
        folder: created if missing.
        group: the processes that hold the tensors; None: this process alone.
    """
    writer = HuggingFaceStorageWriter(folder, save_distributed=True)
    with _unwrap_errors():
        dcp.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)


def restore(tensors: Mapping[str, Tensor], folder: str, group: dist.ProcessGroup | None) -> None:
    """Reads tensors, written by any number of processes, in place; all processes of the group must call it."""
    shapes = stored_shapes(folder)
    if missing := tensors.keys() - shapes.keys():
        raise KeyError(f"{folder} has no {min(missing)}.")
    for name, tensor in tensors.items():
        if shapes[name] != tensor.shape:
            raise StoredPolicyError(
                f"The stored policy {folder} does not fit this run: its {name} has shape {list(shapes[name])}, this "
                f"run's {list(tensor.shape)}. Set model and the lora settings as in its run."
            )
    reader = HuggingFaceStorageReader(folder)
    with _unwrap_errors():
        dcp.load(dict(tensors), storage_reader=reader, process_group=group, no_dist=group is None)


def begin_save(folders: Mapping[str, Mapping[str, Tensor]], group: dist.ProcessGroup | None) -> Future[None]:
    """Copies tensors to host memory and writes them in a thread; they may change as soon as this returns.

    Args:
        folders: the tensors of each folder, written one folder after another by `save`.
        group: the processes that hold the tensors, all of which must call this. The group must have no other use,
            since its processes communicate while training continues. None: this process alone.

    Returns:
        A future; it is done when everything is written, or raises the error of `save`.
    """
    copies = {folder: _copy_to_host(tensors) for folder, tensors in folders.items()}

    def write() -> None:
        for folder in folders:
            save(copies.pop(folder), folder, group)

    thread = ThreadPoolExecutor(1, "checkpoint")
    future = thread.submit(write)
    thread.shutdown(wait=False)
    return future


def _copy_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies tensors to host memory. Uses a new stager every time: torch 2.11's fails the second time."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        return cast(dict[str, Tensor], stager.stage(dict(tensors)))
    finally:
        stager.close()


def checkpoint_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Creates a gloo group of the same processes, for `begin_save` only; all of them must call it."""
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)


@contextmanager
def _unwrap_errors() -> Iterator[None]:
    """Raises the original error instead of torch's `CheckpointException`."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


def stored_shapes(folder: str) -> dict[str, torch.Size]:
    """The shapes of the tensors in a folder, by name; empty if the folder does not exist."""
    if not Path(folder).is_dir():
        return {}
    return {name: tensor.size for name, tensor in _tensor_metadata(_metadata(folder), folder).items()}


def open_weights(folder: str) -> LazyWeights:
    """Opens the tensors of a folder as lazy fp32 arrays, by name.

    All files are opened now, so the arrays can be read even after the folder is removed.
    """
    metadata = _metadata(folder)
    parts: dict[str, list[tuple[tuple[slice, ...], str]]] = {}
    for index, info in metadata.storage_data.items():
        rows = tuple(slice(start, start + size) for start, size in zip(index.offset, info.shape, strict=True))
        parts.setdefault(index.fqn, []).append((rows, info.relative_path))
    # pread: pages of a memory-mapped file would count as this process's memory once they are read.
    paths = {path for tensor_parts in parts.values() for _, path in tensor_parts}
    files = {path: safe_open(path, "numpy", backend="pread") for path in paths}
    shapes = {name: tuple(tensor.size) for name, tensor in _tensor_metadata(metadata, folder).items()}

    def make(name: str) -> np.ndarray:
        array = np.empty(shapes[name], np.float32)
        for rows, path in parts[name]:
            array[rows] = files[path].get_tensor(name)
        return array

    return LazyWeights(shapes, make)


def _metadata(folder: str) -> Metadata:
    return HuggingFaceStorageReader(folder).read_metadata()


def _tensor_metadata(metadata: Metadata, folder: str) -> Mapping[str, TensorStorageMetadata]:
    """The metadata of each tensor."""
    tensors: Mapping[str, Any] = metadata.state_dict_metadata
    for name, tensor in tensors.items():
        if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
            raise FileNotFoundError(f"{folder} has missing or duplicate parts of {name}.")
    return tensors


def adam_moments(weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's state of weights, by names such as `exp_avg.NAME`; nothing for weights before their first step."""
    moments: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if state := optimizer.state.get(weight):
            moments |= {f"{moment}.{name}": state[moment] for moment in MOMENTS}
            moments[f"step.{name}"] = state["step"].reshape(1)
    return moments


def init_moments(weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, names: Iterable[str]) -> None:
    """Initialises AdamW's state with zeros for the weights that have moments among `names` of `adam_moments`."""
    optimizer.state.clear()
    for name in {name.partition(".")[2] for name in names} & weights.keys():
        optimizer.state[weights[name]] = init_adam_state(weights[name], offloaded=isinstance(optimizer, OffloadedAdamW))
