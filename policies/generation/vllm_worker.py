"""What runs inside a vLLM worker to take new weights; with `vllm_lora`, every word of vLLM's internals that we rely on.

vLLM imports this module in a worker before it loads the model there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property
from typing import Any

from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from policies.compat.vllm import end_with_parent
from policies.generation import vllm_lora, weight_transfer  # noqa: F401 (adds its backend)
from policies.models.adapters import peft_names
from policies.models.language_model import meta_model
from policies.models.stored_weights import persistent_buffers
from policies.models.weights import Digest, checksum, extend

vllm_lora.prepare()
end_with_parent()


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

    def load_safetensors(self, path: str) -> tuple[int, list[str]]:
        """Reads a safetensors file of Hugging Face names into the running model.

        Only the path crosses the RPC.

        Returns:
            `checksum` of the tensors as read, and vLLM's names of the model's weights that none of them was put in.
        """
        import torch

        read = 0

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            """One by one, so that this process needs no more of it than a tensor."""
            nonlocal read
            with safe_open(path, framework="pt") as file:
                for name in sorted(file.keys()):
                    tensor = file.get_tensor(name)
                    read = extend(read, name, tensor.float().numpy())
                    yield name, tensor

        model = self.model_runner.get_model()
        with torch.inference_mode(), _Reload(model, self._definition) as reload:
            self.model_runner.reload_weights(weights_iterator=tensors(), is_checkpoint_format=True)
            _pack_heads(model)
        return read, reload.stale()

    @cached_property
    def _definition(self) -> PreTrainedModel:
        """The model as transformers, and so the learner, has it, without weights."""
        from vllm.config import set_current_vllm_config

        config = self.vllm_config.model_config
        with set_current_vllm_config(self.vllm_config):  # which Hugging Face's classes ask for that vLLM decorated
            return meta_model(config.model, config.trust_remote_code)

    # vLLM's weight transfer, in steps that the learner takes (`policies.rllib.weight_sender`).

    def meet_transfer(self, init_info: dict[str, Any]) -> None:
        """Meets the learner."""
        self.init_weight_transfer_engine(init_info)

    def begin_transfer(self, _: None) -> None:
        """Makes ready for new weights. What was begun before, and whose weights then did not come, is forgotten."""
        import torch

        self._digest = Digest()
        with torch.inference_mode():
            self._give_up()
            self._reload = _Reload(self.model_runner.get_model(), self._definition, self._digest)
            self._reloading = ExitStack()
            self._reloading.enter_context(self._reload)
            self.start_weight_update()

    def take_transfer(self, update_info: Any) -> None:
        """Takes new weights, all or some of them.

        Raises:
            RuntimeError: they did not come; what the model holds then is of no use, but it can take others.
        """
        import torch

        with torch.inference_mode():
            try:
                self.update_weights(update_info)
            except BaseException:
                self._give_up()
                raise

    def _give_up(self) -> None:
        """Ends what was begun and not ended, as vLLM refuses to begin again, or would count on with what came."""
        if self._reloading is not None:
            with self._reloading:
                self._reloading = None
                self._weight_update_active = True  # which it is no longer after an error
                self.finish_weight_update()

    def end_transfer(self, _: None) -> tuple[int, list[str]]:
        """Lets the model use them.

        Returns:
            `Digest` of the tensors as they came, and as `load_safetensors` the names of those that did not.
        """
        import torch

        model = self.model_runner.get_model()
        with torch.inference_mode():
            self.finish_weight_update()
            _pack_heads(model)
            if self._reloading is not None:
                self._reloading.close()
                self._reloading = None
        return self._digest.value(), self._reload.stale()

    def load_adapter(self, path: str, number: int, rank: int, alpha: float) -> tuple[int, list[str]]:
        """Reads a safetensors file with an adapter's weights, by the learner's names, in the place of the old ones.

        Returns:
            As `load_safetensors`; nothing of an old adapter is left.

        Raises:
            ModelError: vLLM cannot adapt a layer that the learner adapts.
        """
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is not a dict)
        read = checksum({name: tensor.numpy() for name, tensor in tensors.items()})  # before vLLM scales them
        vllm_lora.put(self.model_runner, peft_names(tensors), number, rank, alpha)
        return read, []


def _pack_heads(model: Any) -> None:
    """On a CPU, vLLM packs a tied `lm_head` at load time, and new weights leave the packed copy as it was (0.32)."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


class _Reload:
    """Lets a model load a learner's weights, as a context, and notes which it took.

    It gets them as a checkpoint holds them: transformers renames weights of some families when it loads them, and puts
    those of all experts into one tensor. What vLLM would load from a checkpoint and no learner changes, it would leave
    undefined (0.32), so that is put back.
    """

    def __init__(self, model: Any, definition: PreTrainedModel, digest: Digest | None = None) -> None:
        """Takes the model.

        Args:
            model: vLLM's.
            definition: the same model, as the learner has it.
            digest: takes the tensors as they come.
        """
        self._model, self._definition, self._digest = model, definition, digest
        self._converts = bool(get_model_conversion_mapping(definition, add_legacy=False))
        self._loaded: set[str] = set()
        self._untouched: set[str] = set()
        """Layers that got nothing, whatever the model says that it loaded."""

    def __enter__(self) -> _Reload:
        stored = self._model.state_dict().keys()
        self._constants = {n: (buffer, buffer.clone()) for n, buffer in self._model.named_buffers() if n in stored}
        self._kernels = _detach_expert_kernels(self._model)
        self._load = self._model.load_weights
        self._model.load_weights = self._load_noting
        return self

    def __exit__(self, *_: object) -> None:
        del self._model.load_weights  # the class's own is back
        for method, kernel in self._kernels:
            method.moe_kernel = method.moe_kernel or kernel
        for name, (buffer, value) in self._constants.items():
            if name not in self._loaded:
                buffer.copy_(value)

    def _load_noting(self, weights: Any) -> Any:
        loaded = self._load(self._converted(weights))
        self._loaded.update(loaded if loaded is not None else (name for name, _ in self._model.named_parameters()))
        layers = ((name, get_layerwise_info(layer)) for name, layer in self._model.named_modules())
        self._untouched = {name for name, info in layers if info.can_load() and not info.load_numel}
        return loaded

    def _converted(self, weights: Any) -> Iterator[tuple[str, Any]]:
        for name, tensor in weights:
            if self._digest is not None:
                self._digest.add(name, tensor)
            stored = {name: tensor}
            yield from (revert_weight_conversion(self._definition, stored) if self._converts else stored).items()

    def stale(self) -> list[str]:
        """The names of the model's weights that were not loaded, but for those that no learner changes."""
        names: dict[int, list[str]] = {}  # some weights have several
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        taken = self._loaded | persistent_buffers(self._definition).keys()
        untouched = self._untouched
        return sorted(
            same[0]
            for same in names.values()
            if taken.isdisjoint(same) or all(name.rpartition(".")[0] in untouched for name in same)
        )


def _detach_expert_kernels(model: Any) -> list[tuple[Any, Any]]:
    """On a CPU, vLLM packs experts when it makes their kernel, but not what is loaded into it later (0.32).

    Returns:
        The methods that lack their kernel now, so make it again when they have weights, and the old kernels.
    """
    if not current_platform.is_cpu():
        return []
    methods: list[Any] = [getattr(module, "quant_method", None) for module in model.modules()]
    kernels = [(method, method.moe_kernel) for method in methods if getattr(method, "moe_kernel", None) is not None]
    for method, _ in kernels:
        method.moe_kernel = None
    return kernels
