"""LoRA adapters in a vLLM engine: engine arguments, requests, and replacing an adapter's weights.

vLLM itself reads adapters from folders. Here a worker reads an adapter's tensors from a file in memory and replaces the
old ones under a constant number. So no folders are left behind, and there is no second copy of an adapter.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from policies.compat.vllm import adapter_manager
from policies.models.lora import Lora
from policies.models.model_check import ModelError

if TYPE_CHECKING:
    import torch
    from vllm.lora.request import LoRARequest

_SUPPORTED_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's `max_lora_rank`
MAX_LORA_RANK = _SUPPORTED_RANKS[-1]
"""The highest rank that vLLM supports."""


def engine_arguments(lora: Lora, adapters: int) -> dict[str, Any]:
    """Returns arguments for `vllm.LLM`, and prepares vLLM for adapters."""
    patch_vllm()
    return {
        "enable_lora": True,
        "max_loras": adapters,
        "max_lora_rank": vllm_max_rank(lora),
    }


def vllm_max_rank(lora: Lora) -> int:
    """Returns the smallest `max_lora_rank` of vLLM that is at least the adapters' rank."""
    return min(rank for rank in _SUPPORTED_RANKS if rank >= lora.rank)


def lora_request(name: str, number: int) -> LoRARequest:
    """Returns the adapter argument of a request.

    Its path does not exist, so that vLLM raises an error if the adapter is missing, instead of generating without it.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, f"{name} was not loaded")


def replace_adapter(model_runner: Any, tensors: dict[str, torch.Tensor], number: int, rank: int, alpha: float) -> None:
    """Replaces an adapter inside a vLLM worker.

    Args:
        number: of the adapter, from 1.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    from policies.generation import vllm_cpu_lora

    worker = model_runner.lora_manager
    manager = adapter_manager(model_runner)
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)  # only some families rename modules
    adapter = LoRAModel.from_lora_tensors(
        number,
        tensors,
        PEFTHelper(r=rank, lora_alpha=alpha, target_modules=[]),  # its alpha may be a fraction
        device="cpu",
        dtype=worker.lora_config.lora_dtype,
        model_vocab_size=worker.vocab_size,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    supported = {*manager.modules, *(part for parts in manager.packed_modules.values() for part in parts)}
    if unsupported := sorted(set(adapter.loras) - supported):
        raise ModelError(
            f"vLLM does not support adapters on {len(unsupported)} of the adapted layers, such as {unsupported[0]}. "
            "Change lora_target_modules, or use backend=transformers."
        )
    manager.remove_adapter(number)
    manager.add_adapter(adapter)
    manager.activate_adapter(number)
    vllm_cpu_lora.discard_packed()


@cache
def patch_vllm() -> None:
    """Patches vLLM 0.32 in this process: installs `GroupedAdapters` on CPUs, and enables adapters for GPT-2.

    GPT-2's layer classes support adapters, but vLLM does not mark the family as supported.
    """
    from policies.generation import vllm_cpu_lora

    vllm_cpu_lora.install()
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.gpt2 import GPT2LMHeadModel
    from vllm.model_executor.models.interfaces import SupportsLoRA

    class GPT2LMHeadModelWithLoRA(GPT2LMHeadModel, SupportsLoRA):
        packed_modules_mapping: ClassVar = {"c_attn": ["c_attn"]}  # q, k and v are one layer in checkpoints too

    ModelRegistry.register_model("GPT2LMHeadModel", GPT2LMHeadModelWithLoRA)
