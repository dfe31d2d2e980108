"""FSDP2: a policy sharded over several processes, each with a part of every weight, gradient and optimizer state.

A block of layers is gathered only while it computes. Gradients are summed over the processes, because each process's
loss is a part of the sum over a mini-batch's tokens.
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

from policies.compat.transformers import no_split_classes
from policies.models.language_model import load_language_model, master_dtype
from policies.models.model_check import ModelError
from policies.models.stored_weights import StoredWeights, stored_tensors


@cache
def learner_mesh(policies: int, shards: int, device: str) -> DeviceMesh:
    """The run's learner processes (torch's default group) as a 2-D device mesh.

    The processes along `shard` train one policy together; those along `policy` have the same shard of all policies.
    """
    return init_device_mesh(device, (policies, shards), mesh_dim_names=("policy", "shard"))


def shard(root: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, dtype: torch.dtype | None = None) -> None:
    """Shards a module's parameters over a 1-D mesh, in place, with `fully_shard` on every block and on the rest.

    Args:
        root: the module whose forward is called, or whose other forward methods are registered with FSDP.
        dtype: the type in which trained parameters are gathered; gradients are summed in fp32 or better. None: their
            own type. (Autocast instead would keep the cast copy of all parameters for the backward pass.)
    """
    precision = MixedPrecisionPolicy(dtype, master_dtype(dtype) if dtype else None, cast_forward_inputs=False)
    for module in (*blocks, root):
        # If the root stayed gathered after a forward pass, writes to its weights would be lost.
        fully_shard(module.to(mesh.device_type), mesh=mesh, reshard_after_forward=True, mp_policy=precision)
    modules: list[Any] = list(root.modules())
    for module in modules:
        if isinstance(module, FSDPModule):  # by default gradients are averaged, by an operation that gloo lacks
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reduce_scatter_unused_params(True)  # an expert may get no token in one of the processes


def transformer_blocks(lm: PreTrainedModel, fix: str = "shards_per_policy=1") -> list[nn.Module]:
    """The transformer blocks of an LM, by the class names that its family declares (`_no_split_modules`).

    Args:
        fix: the setting that does without them, for the error if there are none.
    """
    names = no_split_classes(lm)
    # FSDP gives a sharded block a subclass of its class.
    blocks = [module for module in lm.modules() if not names.isdisjoint(c.__name__ for c in type(module).__mro__)]
    if not blocks:
        raise ModelError(
            f"The transformer blocks of `{lm.name_or_path}` are unknown: its class {type(lm).__name__} does not "
            f"declare them (`_no_split_modules`). Set {fix}."
        )
    return blocks


@torch.no_grad()
def load_sharded(lm: PreTrainedModel, path: str, trust_remote_code: bool, mesh: DeviceMesh) -> None:
    """Loads the weights of a sharded LM that was made by `init_empty`; each process reads only its own rows.

    If the files store the weights in another layout than the model's, the processes load the whole LM one after
    another.
    """
    stored, tensors = StoredWeights(path), stored_tensors(lm)
    names = stored.names(lm)
    if names is not None:
        for name, stored_name in names.items():
            start, size = _local_rows(tensors[name])
            if size:
                local_shard(tensors[name]).copy_(stored.rows(stored_name, start, start + size))
        return
    for rank in range(mesh.size()):
        if rank == mesh.get_local_rank():
            loaded = stored_tensors(load_language_model(path, trust_remote_code))
            for name, tensor in tensors.items():
                if ".lora_" not in name:
                    copy_full(tensor, loaded[name.replace(".base_layer.", ".")])
        dist.barrier(mesh.get_group())


def local_shard(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor, as a view; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """A tensor with all its shards gathered; all processes must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copy_full(tensor: Tensor, value: Tensor) -> None:
    """Copies a full value into a tensor; into a sharded one, this process's rows."""
    if isinstance(tensor, DTensor):
        start, size = _local_rows(tensor)
        local_shard(tensor).copy_(value[start : start + size])
    else:
        tensor.copy_(value)


def _local_rows(tensor: Tensor) -> tuple[int, int]:
    """First row and number of rows of this process's shard; FSDP2 splits the first dimension."""
    if not isinstance(tensor, DTensor):
        return 0, len(tensor) if tensor.dim() else 1
    mesh = tensor.device_mesh
    rows = -(-tensor.shape[0] // mesh.size())
    start = min(rows * mesh.get_local_rank(), tensor.shape[0])
    return start, tensor.to_local().shape[0]
