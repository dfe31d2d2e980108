"""A policy's trained weights, and Adam's moments, as safetensors files in a folder: of each process that learns it one.

They are torch's distributed checkpoints in their Hugging Face format, whose headers say which part of a tensor a file
holds: any number of processes reads what any other number wrote, and nothing in them is code.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from policies.learning.offloaded_adam import MOMENTS, OffloadedAdamW, fresh

FILES = "*.safetensors"


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
    with _alone(group is None) as alone:
        dcp.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=alone)


def restore(tensors: Mapping[str, Tensor], folder: str, group: dist.ProcessGroup | None) -> None:
    """Reads what any number of processes saved into tensors; all of the group must call it alike.

    Raises:
        KeyError: one of them is not there.
        FileNotFoundError: parts of one are not there.
    """
    if missing := tensors.keys() - stored(folder).keys():
        raise KeyError(f"{folder} has no {min(missing)}.")
    with _alone(group is None) as alone:
        dcp.load(dict(tensors), storage_reader=HuggingFaceStorageReader(folder), process_group=group, no_dist=alone)


@contextmanager
def _alone(alone: bool) -> Iterator[bool]:
    """Lets a process be alone without torch's warning; raises what happened, not what torch puts around it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            yield alone
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None


def stored(folder: str) -> dict[str, torch.Size]:
    """The shapes of the tensors in a folder, by name; of one that is not there none.

    Raises:
        FileNotFoundError: parts of a tensor are not there.
    """
    if not Path(folder).is_dir():
        return {}
    metadata: Mapping[str, Any] = HuggingFaceStorageReader(folder).read_metadata().state_dict_metadata
    for name, of in metadata.items():
        if sum(chunk.sizes.numel() for chunk in of.chunks) != of.size.numel():
            raise FileNotFoundError(f"{folder} does not have all parts of {name}, each once.")
    return {name: of.size for name, of in metadata.items()}


def read(folder: Path) -> dict[str, np.ndarray]:
    """Reads fp32 tensors whole, by name."""
    tensors = {name: torch.empty(size) for name, size in stored(str(folder)).items()}
    restore(tensors, str(folder), None)
    return {name: tensor.numpy() for name, tensor in tensors.items()}


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
