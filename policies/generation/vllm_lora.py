"""Adapters in a vLLM engine: how it is started for them, which one a request asks for, how new weights replace old.

vLLM's own way reads adapters from folders. Here a worker takes an adapter's tensors from a file in memory and puts them
in the place of the old ones, under a number that stays: no folders to leave behind, and no second copy of an adapter.
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

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has room for
MOST = _RANKS[-1]
"""The highest rank that vLLM serves."""


def engine_arguments(lora: Lora, adapters: int) -> dict[str, Any]:
    """What `vllm.LLM` is told.

    Args:
        lora: what the adapters are like.
        adapters: how many there are.
    """
    prepare()
    return {
        "enable_lora": True,
        "max_loras": adapters,
        "max_lora_rank": room(lora),
    }


def room(lora: Lora) -> int:
    """The least of vLLM's maximal ranks that holds the adapters."""
    return min(rank for rank in _RANKS if rank >= lora.rank)


def request(name: str, number: int) -> LoRARequest:
    """Names the adapter of a generation. Its path leads nowhere: were it missing, vLLM would say so, not go without."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, f"{name} was not loaded")


def put(model_runner: Any, tensors: dict[str, torch.Tensor], number: int, rank: int, alpha: float) -> None:
    """Replaces an adapter inside a vLLM worker.

    Args:
        model_runner: the worker's.
        tensors: by PEFT's names.
        number: of the adapter, from 1.
        rank, alpha: of the adapter.

    Raises:
        ModelError: vLLM has no place for some of the tensors; it would leave them out without a word.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

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
    places = {*manager.modules, *(part for parts in manager.packed_modules.values() for part in parts)}
    if homeless := sorted(set(adapter.loras) - places):
        raise ModelError(
            f"vLLM cannot adapt {len(homeless)} layers that the learner adapts, such as {homeless[0]}. Name others in "
            "lora_target_modules, or use backend=transformers."
        )
    manager.remove_adapter(number)
    manager.add_adapter(adapter)
    manager.activate_adapter(number)


@cache
def prepare() -> None:
    """Changes two things about vLLM 0.32 in this process: how adapters are computed on a CPU, and that GPT-2 can have
    them. Its layers are of classes that can, but the family is not marked so.
    """
    from policies.generation import vllm_cpu_lora

    vllm_cpu_lora.use()
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.gpt2 import GPT2LMHeadModel
    from vllm.model_executor.models.interfaces import SupportsLoRA

    class GPT2LMHeadModelWithLoRA(GPT2LMHeadModel, SupportsLoRA):
        packed_modules_mapping: ClassVar = {"c_attn": ["c_attn"]}  # q, k and v, but one layer in its checkpoints too

    ModelRegistry.register_model("GPT2LMHeadModel", GPT2LMHeadModelWithLoRA)
