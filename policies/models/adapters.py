"""LoRA: every policy is a low-rank adapter on one frozen base, which a process holds once.

A policy is modules of its own around the base's very tensors, with adapters injected by PEFT. So the base without
adapters stays what it was, the reference policy, and nothing has to be switched on or off between policies (PEFT's
`set_adapter` flips `requires_grad`, which costs all adapters but the last their gradients).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from policies.compat.transformers import attention_of
from policies.models.families import read_table
from policies.models.language_model import master_dtype, meta_model
from policies.models.lora import Lora
from policies.models.model_check import ModelError

if TYPE_CHECKING:
    from peft import LoraConfig

T = TypeVar("T")

_MAMBA_WEIGHTS = ("out_proj", "dt_proj")
"""Layers of Mamba's blocks whose fused kernels take the weight alone; PEFT refuses some of them."""
_NAME = "default"  # PEFT's, of the one adapter that a skeleton has


def add_lora(base: PreTrainedModel, lora: Lora) -> PreTrainedModel:
    """Returns a model that shares every tensor of `base` and has an adapter of its own, fp32 and trainable.

    The adapter starts as PEFT's do, A random and B zero, so the model answers as the base does. A depends on the seed
    alone: the policies of a run start alike, as copies of a model would.

    Args:
        base: frozen; it is not changed.
        lora: what the adapter is like.

    Raises:
        ModelError: the base has no linear layer of a name in `lora.targets`, or one that cannot carry an adapter.
    """
    from peft import inject_adapter_in_model

    reject_targets(base, lora.targets)
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*base.parameters(), *base.buffers())}
    for module in base.modules():  # bitsandbytes keeps scales beside its 4-bit weights
        if (scales := vars(module).get("quant_state")) is not None:
            shared[id(scales)] = scales
    skeleton = copy.deepcopy(base, shared)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(lora.seed)
        inject_adapter_in_model(peft_config(base, lora), skeleton, _NAME)
    for parameter in skeleton.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(master_dtype(parameter.dtype))  # PEFT gives them the type of the base
    return skeleton


def lora_delta(skeleton: PreTrainedModel, layer: str, factors: Mapping[str, Tensor]) -> Tensor:
    """What an adapter adds to the weight of a layer.

    Args:
        skeleton: as `adapted` makes it of a base on the meta device.
        layer: its name.
        factors: the layer's own, by their names in it: `lora_A.default.weight` and `lora_B.default.weight`.
    """
    adapter: Any = skeleton.get_submodule(layer)
    adapter.load_state_dict(factors, strict=False, assign=True)
    product = cast(Tensor, adapter.get_delta_weight(_NAME).detach())
    adapter.to("meta")
    return product


def reject_targets(model: PreTrainedModel, targets: Sequence[str]) -> None:
    """Refuses names of layers that a model lacks, or that cannot carry an adapter: PEFT would leave them out silently.

    Raises:
        ModelError: names them, and the layers that can be adapted.
    """
    usable = _linear_layers(model)
    if unusable := sorted(set(targets) - set(usable)):
        raise ModelError(
            f"`{model.name_or_path}` has no linear layer {', '.join(map(repr, unusable))} to adapt. It has "
            f"{', '.join(usable)}; set lora_target_modules to some of them, or leave it out."
        )


def linear_layers(model: PreTrainedModel) -> list[str]:
    """The names of a model's linear layers that can carry an adapter, without where they are.

    Left out are the output head; layers that compute in a way of their own, such as the router of a mixture of experts;
    layers whose weight their block multiplies with itself, past the adapter; and those that vLLM is known not to adapt,
    whatever is installed here: what an adapter consists of must not depend on the machine.
    """
    barred = read_table().families.get(model.config.model_type, {}).get("vllm", {}).get("lora_barred", {})
    return [name for name in _linear_layers(model) if name not in barred]


def _linear_layers(model: PreTrainedModel) -> list[str]:
    head = model.get_output_embeddings()
    usable: set[str] = set()
    barred: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and module is not head:
            block, _, name = path.rpartition(".")
            fused = name in _MAMBA_WEIGHTS and _is_mamba(model.get_submodule(block))
            (barred if fused or not _is_plain(module) else usable).add(name)
    return sorted(usable - barred)


def describe_family(path: str, trust_remote_code: bool = False) -> str:
    """Returns a model's family in words: its attention, and the layers that can carry an adapter.

    Raises:
        ModelError: nothing loadable there.
    """
    model = meta_model(path, trust_remote_code)
    return f"{model.config.model_type}: {attention_of(model)} attention; LoRA on {', '.join(linear_layers(model))}"


def _is_mamba(block: nn.Module) -> bool:
    return hasattr(block, "A_log") and any(word in type(block).__name__ for word in ("Mamba", "Mixer"))


def _is_plain(layer: nn.Linear | Conv1D) -> bool:
    """Whether a linear layer takes a tensor and gives one, as PEFT relies on; a router of experts gives several."""
    if type(layer).forward in (nn.Linear.forward, Conv1D.forward) or type(layer).__module__.startswith("bitsandbytes"):
        return True
    weights = {name: torch.empty_like(weight, device="meta") for name, weight in layer.named_parameters()}
    width, features = layer.in_features, layer.out_features
    try:
        out = torch.func.functional_call(layer, weights, torch.empty(2, width, device="meta", dtype=layer.weight.dtype))
    except Exception:  # of any kind: it needs more than a tensor, or values
        return False
    return isinstance(out, Tensor) and out.shape == (2, features)


def peft_config(base: PreTrainedModel, lora: Lora) -> LoraConfig:
    """PEFT's description of the adapters, as it stands in an `adapter_config.json`."""
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base.name_or_path,
        r=lora.rank,
        lora_alpha=cast(int, lora.alpha),
        lora_dropout=0.0,  # sampler and learner must see one distribution
        target_modules=list(lora.targets or linear_layers(base)),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in base.modules()),
    )


def peft_names(weights: Mapping[str, T]) -> dict[str, T]:
    """An adapter's weights by the names that PEFT saves, and vLLM reads, instead of `adapted`'s."""
    return {f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": array for name, array in weights.items()}
