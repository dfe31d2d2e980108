"""LoRA: every policy is a low-rank adapter on one frozen base model, which a process holds once.

Each policy has its own modules, which share the base's tensors, with adapters injected by PEFT. So the base itself
stays unchanged, as the reference policy, and adapters need not be switched between policies (PEFT's `set_adapter` flips
`requires_grad`, which loses the gradients of all adapters but the last).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from policies.compat.transformers import attn_implementation, can_switch_attention
from policies.models.families import fix_rope_factors, read_family_table, supports_prefix_trees
from policies.models.language_model import master_dtype, meta_model
from policies.models.lora import Lora
from policies.models.model_check import ModelError

if TYPE_CHECKING:
    from peft import LoraConfig

T = TypeVar("T")

_MAMBA_WEIGHTS = ("out_proj", "dt_proj")
"""Layers of Mamba blocks whose fused kernels use only the weight, not the module; PEFT rejects some of them."""
_ADAPTER = "default"  # PEFT's name of a model's first adapter


def add_lora(base: PreTrainedModel, lora: Lora) -> PreTrainedModel:
    """Returns a model that shares every tensor of `base` and has its own adapter, fp32 and trainable.

    The adapter is initialised like PEFT's, A random and B zero, so the model computes the same as the base. A depends
    only on the seed: all policies of a run start equal, as copies of a model would.

    Args:
        base: frozen; it is not changed.
    """
    from peft import inject_adapter_in_model

    reject_targets(base, lora.targets)
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*base.parameters(), *base.buffers())}
    for module in base.modules():  # bitsandbytes stores scales in addition to its 4-bit weights
        if (scales := vars(module).get("quant_state")) is not None:
            shared[id(scales)] = scales
    model = copy.deepcopy(base, shared)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(lora.seed)
        inject_adapter_in_model(peft_config(base, lora), model, _ADAPTER)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(master_dtype(parameter.dtype))  # PEFT uses the type of the base
    return model


def merge_lora(model: PreTrainedModel) -> None:
    """Adds a model's adapter to the weights of the base that it shares: B A · alpha / rank."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.merge()


def reject_targets(model: PreTrainedModel, targets: Sequence[str]) -> None:
    """Rejects layers that a model does not have or that cannot be adapted; PEFT would skip them silently."""
    usable = _linear_layers(model)
    if unusable := sorted(set(targets) - set(usable)):
        raise ModelError(
            f"`{model.name_or_path}` has no linear layer {', '.join(map(repr, unusable))} to adapt. It has "
            f"{', '.join(usable)}; set lora_target_modules to some of these, or leave it unset."
        )


def linear_layers(model: PreTrainedModel) -> list[str]:
    """The names of a model's linear layers that can be adapted, such as `q_proj`.

    Excluded are the output head; layers with their own forward, such as the router of a mixture of experts; layers
    whose weight is used directly by their block, bypassing the adapter; and layers that vLLM cannot adapt, even if vLLM
    is not installed here, since the adapter must not depend on the machine.
    """
    excluded = read_family_table().families.get(model.config.model_type, {}).get("vllm", {}).get("lora_barred", {})
    return [name for name in _linear_layers(model) if name not in excluded]


def _linear_layers(model: PreTrainedModel) -> list[str]:
    head = model.get_output_embeddings()
    usable: set[str] = set()
    excluded: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and module is not head:
            block, _, name = path.rpartition(".")
            fused = name in _MAMBA_WEIGHTS and _is_mamba(model.get_submodule(block))
            (excluded if fused or not _is_plain(module) else usable).add(name)
    return sorted(usable - excluded)


def describe_family(path: str, max_length: int, trust_remote_code: bool = False) -> str:
    """Describes a model's family in one line: attention, longrope, layers that LoRA can adapt, prefix sharing."""
    model = meta_model(path, trust_remote_code)
    measured = model.config.model_type in read_family_table().families
    shares = supports_prefix_trees(model.config, max_length)
    sharing = "shared prefixes are learned once" if shares else "plain rows"
    attention = f"{model.config.model_type}: {attn_implementation(model)} attention"
    if attn_implementation(model) != "eager" and not can_switch_attention(model) and not measured:
        attention += ", which cannot be compared with eager attention"
    if fix_rope_factors(model.config, max_length):
        attention += f"; longrope's long factors for rows of all lengths, as some may have {max_length} tokens"
    return f"{attention}; LoRA on {', '.join(linear_layers(model))}; {sharing}"


def _is_mamba(block: nn.Module) -> bool:
    return hasattr(block, "A_log") and any(word in type(block).__name__ for word in ("Mamba", "Mixer"))


def _is_plain(layer: nn.Linear | Conv1D) -> bool:
    """Whether a linear layer maps one tensor to one tensor, as PEFT requires; a router of experts returns several."""
    if type(layer).forward in (nn.Linear.forward, Conv1D.forward) or type(layer).__module__.startswith("bitsandbytes"):
        return True
    weights = {name: torch.empty_like(weight, device="meta") for name, weight in layer.named_parameters()}
    width, features = layer.in_features, layer.out_features
    try:
        out = torch.func.functional_call(layer, weights, torch.empty(2, width, device="meta", dtype=layer.weight.dtype))
    except Exception:  # any error: the layer needs other inputs, or values instead of meta tensors
        return False
    return isinstance(out, Tensor) and out.shape == (2, features)


def peft_config(base: PreTrainedModel, lora: Lora) -> LoraConfig:
    """PEFT's configuration of the adapter, as in `adapter_config.json`."""
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base.name_or_path,
        r=lora.rank,
        lora_alpha=cast(int, lora.alpha),
        lora_dropout=0.0,  # sampler and learner must compute the same distribution
        target_modules=list(lora.targets or linear_layers(base)),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in base.modules()),
    )


def peft_names(weights: Mapping[str, T]) -> dict[str, T]:
    """Renames an adapter's weights from `add_lora`'s names to those that PEFT saves and vLLM loads."""
    return {f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}": array for name, array in weights.items()}
