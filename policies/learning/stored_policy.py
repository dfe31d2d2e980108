"""A policy's trained weights, and Adam's moments, as safetensors files in a folder: of each process that learns it one.

They are torch's distributed checkpoints in their Hugging Face format, whose headers say which part of a tensor a file
holds: any number of processes reads what any other number wrote, and nothing in them is code.
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

from policies.learning.offloaded_adam import MOMENTS, OffloadedAdamW, fresh
from policies.models.weights import LazyWeights

FILES = "*.safetensors"


class StoredPolicyError(ValueError):
    """A stored policy cannot be taken; the message says what differs, and which settings decide it."""


warnings.filterwarnings("ignore", "torch.distributed is disabled")  # of a process that is alone


def save(tensors: Mapping[str, Tensor], folder: str, group: dist.ProcessGroup | None) -> None:
    """Writes tensors; all of the group must call it alike.

    Args:
        tensors: by name; of those that are sharded each process writes its part.
        folder: on each process's machine; made if it is not there.
        group: the processes that have them; None: this one alone.

    Raises:
        OSError: one of the group could not write.
    """
    writer = HuggingFaceStorageWriter(folder, save_distributed=True)
    with _plain_errors():
        dcp.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)


def restore(tensors: Mapping[str, Tensor], folder: str, group: dist.ProcessGroup | None) -> None:
    """Reads what any number of processes saved into tensors; all of the group must call it alike.

    Raises:
        KeyError: one of them is not there.
        StoredPolicyError: one has another shape there.
        FileNotFoundError: parts of one are not there.
    """
    shapes = stored(folder)
    if missing := tensors.keys() - shapes.keys():
        raise KeyError(f"{folder} has no {min(missing)}.")
    for name, tensor in tensors.items():
        if shapes[name] != tensor.shape:
            raise StoredPolicyError(
                f"The stored policy {folder} is of another shape: its {name} is {list(shapes[name])}, this run's "
                f"{list(tensor.shape)}. Set model, num_agents, critic_inputs and the lora settings as in its run."
            )
    reader = HuggingFaceStorageReader(folder)
    with _plain_errors():
        dcp.load(dict(tensors), storage_reader=reader, process_group=group, no_dist=group is None)


def begin_save(folders: Mapping[str, Mapping[str, Tensor]], group: dist.ProcessGroup | None) -> Future[None]:
    """Copies tensors to the machine's memory, and begins to write them: they may change once this returns.

    Args:
        folders: what is written into each, one after another, as of `save`.
        group: the processes that have them, all of which must call this alike; a group for nothing else, since they
            talk about what they write while they go on. None: this one alone.

    Returns:
        What is done when all is written, or has what `save` raises.
    """
    copies = {folder: _copied(tensors) for folder, tensors in folders.items()}

    def write() -> None:
        for folder in folders:
            save(copies.pop(folder), folder, group)

    thread = ThreadPoolExecutor(1, "checkpoint")
    written = thread.submit(write)
    thread.shutdown(wait=False)
    return written


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies tensors to the machine's memory. A stager serves once: torch 2.11's fails the second time."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        return cast(dict[str, Tensor], stager.stage(dict(tensors)))
    finally:
        stager.close()


def writing_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same processes, for `begin_save` alone; all of them must ask alike."""
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raises what happened, not what torch puts around it."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


def stored(folder: str) -> dict[str, torch.Size]:
    """The shapes of the tensors in a folder, by name; of one that is not there none.

    Raises:
        FileNotFoundError: parts of a tensor are not there.
    """
    return {name: of.size for name, of in _tensors(_metadata(folder), folder).items()} if Path(folder).is_dir() else {}


def read(folder: str) -> LazyWeights:
    """Fp32 tensors, by name. Their files are open at once: they can be read even if the folder is removed meanwhile.

    Raises:
        FileNotFoundError: parts of a tensor, or all of them, are not there.
    """
    metadata = _metadata(folder)
    parts: dict[str, list[tuple[tuple[slice, ...], str]]] = {}
    for index, info in metadata.storage_data.items():
        rows = tuple(slice(start, start + size) for start, size in zip(index.offset, info.shape, strict=True))
        parts.setdefault(index.fqn, []).append((rows, info.relative_path))
    # What is mapped to memory would count as the process's own, once it was read.
    files = {
        file: safe_open(file, "numpy", backend="pread") for file in {file for of in parts.values() for _, file in of}
    }
    found = {name: tuple(of.size) for name, of in _tensors(metadata, folder).items()}

    def make(name: str) -> np.ndarray:
        whole = np.empty(found[name], np.float32)
        for rows, file in parts[name]:
            whole[rows] = files[file].get_tensor(name)
        return whole

    return LazyWeights(found, make)


def _metadata(folder: str) -> Metadata:
    return HuggingFaceStorageReader(folder).read_metadata()


def _tensors(metadata: Metadata, folder: str) -> Mapping[str, TensorStorageMetadata]:
    """What is known of each tensor.

    Raises:
        FileNotFoundError: parts of one are not there.
    """
    tensors: Mapping[str, Any] = metadata.state_dict_metadata
    for name, of in tensors.items():
        if sum(chunk.sizes.numel() for chunk in of.chunks) != of.size.numel():
            raise FileNotFoundError(f"{folder} does not have all parts of {name}, each once.")
    return tensors


def moments(weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What AdamW knows of weights, by names that `make_moments` takes; of those that it never changed nothing."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if known := optimizer.state.get(weight):
            found |= {f"{moment}.{name}": known[moment] for moment in MOMENTS}
            found[f"step.{name}"] = known["step"].reshape(1)
    return found


def make_moments(weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, names: Iterable[str]) -> None:
    """Gives AdamW zeros, where there were moments of such names, and nothing elsewhere."""
    optimizer.state.clear()
    for name in {name.partition(".")[2] for name in names} & weights.keys():
        optimizer.state[weights[name]] = fresh(weights[name], offloaded=isinstance(optimizer, OffloadedAdamW))
