"""An LLM over several processes, each of which holds a part of every weight (FSDP2), gradient and optimizer state.

A block of layers is whole only while it is computed. Gradients are summed over the processes, as each process's loss is
a part of the sum over a mini-batch's tokens.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from policies.compat.transformers import block_classes
from policies.models.language_model import load_language_model, master_dtype
from policies.models.model_check import ModelError
from policies.models.stored_weights import StoredWeights, persistent_buffers


@cache
def learner_mesh(policies: int, shards: int, device: str) -> DeviceMesh:
    """This run's learner processes, which are torch's default group, as a mesh: each row, `shard`, learns one LLM; each
    column, `policy`, has the same part of all of them.
    """
    return init_device_mesh(device, (policies, shards), mesh_dim_names=("policy", "shard"))


def shard(root: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, dtype: torch.dtype | None = None) -> None:
    """Splits a module's parameters over a mesh of one dimension, in place: those of each block, and the others.

    Args:
        root: what is called, or has its forward methods registered.
        blocks: parts of it that are gathered one after another.
        mesh: the processes.
        dtype: in which they are gathered, where they are trained; gradients are summed in fp32 or better. None: as they
            are. Autocast would keep what it casts for the backward pass, so all of the LLM.
    """
    precision = MixedPrecisionPolicy(dtype, master_dtype(dtype) if dtype else None, cast_forward_inputs=False)
    for module in (*blocks, root):
        # If the root stayed whole after a forward pass, what is written to its weights would be lost.
        fully_shard(module.to(mesh.device_type), mesh=mesh, reshard_after_forward=True, mp_policy=precision)
    modules: list[Any] = list(root.modules())
    for module in modules:
        if isinstance(module, FSDPModule):  # by default gradients are means, by an operation that gloo lacks
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reduce_scatter_unused_params(True)  # an expert may have no token on one of the processes


def blocks_of(lm: PreTrainedModel) -> list[nn.Module]:
    """The layers of an LLM that are not to be split further, by what its family says.

    Raises:
        ModelError: it says nothing.
    """
    names = block_classes(lm)
    found = [module for module in lm.modules() if type(module).__name__ in names]
    if not found:
        raise ModelError(
            f"`{lm.name_or_path}` cannot be sharded: its family ({type(lm).__name__}) does not say which of its "
            "modules are blocks. Set shards_per_policy=1."
        )
    return found


@torch.no_grad()
def fill(lm: PreTrainedModel, path: str, trust_remote_code: bool, mesh: DeviceMesh) -> None:
    """Gives an LLM that was made hollow, and split, its weights: of each the own rows, as they are read from its files.

    Where the files do not hold the weights as the family has them, each process of the mesh loads the LLM whole, one
    after another.
    """
    stored = StoredWeights(path)
    names = stored.names(lm)
    if names is not None:
        for name, tensor in (*lm.named_parameters(), *persistent_buffers(lm).items()):
            if name in names:
                start, size = _own(tensor) if isinstance(tensor, DTensor) else (0, len(tensor) if tensor.dim() else 1)
                if size:
                    local(tensor).copy_(stored.rows(names[name], start, start + size))
        return
    for turn in range(mesh.size()):
        if turn == mesh.get_local_rank():
            whole_lm = load_language_model(path, trust_remote_code)
            loaded = {**dict(whole_lm.named_parameters()), **persistent_buffers(whole_lm)}
            for name, tensor in (*lm.named_parameters(), *persistent_buffers(lm).items()):
                if ".lora_" not in name:
                    put(tensor, loaded[name.replace(".base_layer.", ".")])
        dist.barrier(mesh.get_group())


def local(tensor: Tensor) -> Tensor:
    """What this process has of a tensor; writing to it changes the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A tensor with all its parts; all processes must ask alike."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def put(tensor: Tensor, value: Tensor) -> None:
    """Copies a whole tensor into one that may be sharded: of that, the own part."""
    if isinstance(tensor, DTensor):
        start, size = _own(tensor)
        local(tensor).copy_(value[start : start + size])
    else:
        tensor.copy_(value)


def _own(tensor: DTensor) -> tuple[int, int]:
    """Where this process's rows of a sharded tensor begin, and how many there are; FSDP2 splits the first dimension."""
    mesh = tensor.device_mesh
    rows = -(-tensor.shape[0] // mesh.size())
    start = min(rows * mesh.get_local_rank(), tensor.shape[0])
    return start, tensor.to_local().shape[0]
