"""Loading new weights inside a vLLM worker. This module and `vllm_lora` contain our uses of vLLM's worker internals.

vLLM imports this module in a worker before it loads the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from policies.compat.vllm import exit_with_parent, skip_token_ranks
from policies.generation import vllm_lora, weight_transfer  # noqa: F401 (adds its backend)
from policies.models.adapters import peft_names
from policies.models.language_model import meta_model
from policies.models.stored_weights import persistent_buffers
from policies.models.weights import Digest, checksum, extend_checksum

vllm_lora.patch_vllm()
exit_with_parent()
skip_token_ranks()


class WeightSync:
    """Mixed into vLLM's worker (`worker_extension_cls`), reached through `collective_rpc`."""

    model_runner: Any
    vllm_config: Any
    init_weight_transfer_engine: Any
    start_weight_update: Any
    update_weights: Any
    finish_weight_update: Any
    _weight_update_active: bool
    _reloading: ExitStack | None = None

    def load_weights(self, path: str) -> tuple[int, list[str]]:
        """Loads a file of `shared_memory_file` with Hugging Face names into the running model.

        Only the path crosses the RPC.

        Returns:
            `checksum` of the tensors as read, and vLLM's names of the model's weights that were not updated.
        """
        read = 0

        def tensors() -> Iterator[tuple[str, Tensor]]:
            """Reads one tensor at a time, so that this process never holds them all."""
            nonlocal read
            for name, tensor in sorted(_read(path).items()):
                read = extend_checksum(read, name, tensor.float().numpy())
                yield name, tensor

        model = self.model_runner.get_model()
        with torch.inference_mode(), _Reload(model, self._definition) as reload:
            self.model_runner.reload_weights(weights_iterator=tensors(), is_checkpoint_format=True)
            _pack_heads(model)
        return read, reload.stale()

    @cached_property
    def _definition(self) -> PreTrainedModel:
        """The model in transformers' form, which the learner uses, without weights."""
        from vllm.config import set_current_vllm_config

        config = self.vllm_config.model_config
        with set_current_vllm_config(self.vllm_config):  # required by Hugging Face classes that vLLM has decorated
            return meta_model(config.model, config.trust_remote_code)

    # The steps of vLLM's weight transfer, called by the learner (`policies.rllib.weight_sender`).

    def connect_transfer(self, init_info: dict[str, Any]) -> None:
        """Connects to the learner."""
        self.init_weight_transfer_engine(init_info)

    def start_transfer(self, _: None) -> None:
        """Starts a weight update. Aborts an earlier one whose weights did not arrive."""
        self._digest = Digest()
        with torch.inference_mode():
            self._abort_update()
            self._reload = _Reload(self.model_runner.get_model(), self._definition, self._digest)
            self._reloading = ExitStack()
            self._reloading.enter_context(self._reload)
            self.start_weight_update()

    def receive_transfer(self, update_info: Any) -> None:
        """Receives all or some of the new weights."""
        with torch.inference_mode():
            try:
                self.update_weights(update_info)
            except BaseException:
                self._abort_update()
                raise

    def _abort_update(self) -> None:
        """Finishes an unfinished update. Otherwise vLLM would reject the next one, or continue counting its tensors."""
        if self._reloading is not None:
            with self._reloading:
                self._reloading = None
                self._weight_update_active = True  # vLLM clears it after an error
                self.finish_weight_update()

    def finish_transfer(self, _: None) -> tuple[int, list[str]]:
        """Finishes the weight update.

        Returns:
            `Digest` of the received tensors, and the names of weights that were not updated, as `load_weights`.
        """
        model = self.model_runner.get_model()
        with torch.inference_mode():
            self.finish_weight_update()
            _pack_heads(model)
            if self._reloading is not None:
                self._reloading.close()
                self._reloading = None
        return self._digest.value(), self._reload.stale()

    def load_adapter(self, path: str, number: int, rank: int, alpha: float) -> tuple[int, list[str]]:
        """Replaces an adapter by the weights of a file of `shared_memory_file` with the learner's names.

        Returns:
            As `load_weights`. The whole adapter is replaced, so no weight is stale.
        """
        tensors = _read(path)
        read = checksum({name: tensor.numpy() for name, tensor in tensors.items()})  # before vLLM scales them
        vllm_lora.replace_adapter(self.model_runner, peft_names(tensors), number, rank, alpha)
        return read, []


def _read(path: str) -> dict[str, Tensor]:
    """Maps the tensors of a file of `shared_memory_file` into memory."""
    return cast(dict[str, Tensor], torch.load(path, mmap=True, weights_only=True))


def _pack_heads(model: Any) -> None:
    """Packs tied heads again. On a CPU, vLLM 0.32 packs a tied `lm_head` when it loads the model, but not later."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


class _Reload:
    """A context in which a vLLM model loads a learner's weights. It tracks which weights were loaded.

    The weights are converted back to the checkpoint's format, because transformers renames weights of some families
    when it loads them, and merges the weights of all experts into one tensor. vLLM 0.32 leaves buffers undefined that a
    checkpoint contains but no learner changes, so their values are restored.
    """

    def __init__(self, model: Any, definition: PreTrainedModel, digest: Digest | None = None) -> None:
        """Initializes the context."""
        self._model, self._definition, self._digest = model, definition, digest
        self._needs_conversion = bool(get_model_conversion_mapping(definition, add_legacy=False))
        self._loaded: set[str] = set()
        self._untouched: set[str] = set()
        """Layers that received no weights, even if the model reports them as loaded."""

    def __enter__(self) -> _Reload:
        persistent = self._model.state_dict().keys()
        self._buffers = {n: (buffer, buffer.clone()) for n, buffer in self._model.named_buffers() if n in persistent}
        self._kernels = _detach_expert_kernels(self._model)
        self._load_weights = self._model.load_weights
        self._model.load_weights = self._load_and_track
        return self

    def __exit__(self, *_: object) -> None:
        del self._model.load_weights  # uncovers the class's method
        for method, kernel in self._kernels:
            method.moe_kernel = method.moe_kernel or kernel
        for name, (buffer, value) in self._buffers.items():
            if name not in self._loaded:
                buffer.copy_(value)

    def _load_and_track(self, weights: Any) -> Any:
        loaded = self._load_weights(self._to_checkpoint_format(weights))
        self._loaded.update(loaded if loaded is not None else (name for name, _ in self._model.named_parameters()))
        layers = ((name, get_layerwise_info(layer)) for name, layer in self._model.named_modules())
        self._untouched = {name for name, info in layers if info.can_load() and not info.load_numel}
        return loaded

    def _to_checkpoint_format(self, weights: Any) -> Iterator[tuple[str, Any]]:
        for name, tensor in weights:
            if self._digest is not None:
                self._digest.add(name, tensor)
            tensors = {name: tensor}
            if self._needs_conversion:
                tensors = revert_weight_conversion(self._definition, tensors)
            yield from tensors.items()

    def stale(self) -> list[str]:
        """Returns the names of the model's weights that were not loaded, except buffers that no learner changes."""
        names_by_id: dict[int, list[str]] = {}  # tied weights have several names
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            names_by_id.setdefault(id(parameter), []).append(name)
        updated = self._loaded | persistent_buffers(self._definition).keys()
        untouched = self._untouched
        return sorted(
            names[0]
            for names in names_by_id.values()
            if updated.isdisjoint(names) or all(name.rpartition(".")[0] in untouched for name in names)
        )


def _detach_expert_kernels(model: Any) -> list[tuple[Any, Any]]:
    """Removes the experts' kernels on a CPU. vLLM 0.32 packs expert weights only when it creates the kernel.

    Returns:
        The quantization methods, which create their kernel again when they get weights, and their old kernels.
    """
    if not current_platform.is_cpu():
        return []
    methods: list[Any] = [getattr(module, "quant_method", None) for module in model.modules()]
    kernels = [(method, method.moe_kernel) for method in methods if getattr(method, "moe_kernel", None) is not None]
    for method, _ in kernels:
        method.moe_kernel = None
    return kernels
