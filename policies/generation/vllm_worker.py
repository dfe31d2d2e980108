"""What runs inside a vLLM worker to take new weights; with `vllm_lora`, every word of vLLM's internals that we rely on.

vLLM imports this module in a worker before it loads the model there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from safetensors import safe_open

from policies.generation import vllm_lora, weight_transfer  # noqa: F401 (adds its backend)
from policies.generation.orphans import end_with_parent
from policies.models.adapters import peft_names
from policies.models.weights import Digest, checksum, extend

vllm_lora.prepare()
end_with_parent()


class WeightSync:
    """Mixed into vLLM's worker (`worker_extension_cls`), reached through `collective_rpc`."""

    model_runner: Any
    init_weight_transfer_engine: Any
    start_weight_update: Any
    update_weights: Any
    finish_weight_update: Any
    _weight_update_active: bool
    _noting: ExitStack | None = None

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
        with torch.inference_mode(), _noting_loaded(model) as loaded:
            self.model_runner.reload_weights(weights_iterator=tensors(), is_checkpoint_format=True)
            _pack_heads(model)
        return read, _stale(model, loaded)

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
            self._noting = ExitStack()
            self._loaded = self._noting.enter_context(_noting_loaded(self.model_runner.get_model(), self._digest))
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
        if self._noting is not None:
            self._noting.close()
            self._noting = None
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
        if self._noting is not None:
            self._noting.close()
            self._noting = None
        return self._digest.value(), _stale(model, self._loaded)

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


def _stale(model: Any, loaded: set[str]) -> list[str]:
    return sorted({name for name, _ in model.named_parameters()} - loaded)


@contextmanager
def _noting_loaded(model: Any, digest: Digest | None = None) -> Iterator[set[str]]:
    """Yields a set that gets the names of the weights that the model loads meanwhile; vLLM only logs those it lacks.

    A digest takes the tensors as they come.
    """
    loaded: set[str] = set()
    load = model.load_weights

    def passing(weights: Any) -> Any:
        for name, tensor in weights:
            if digest is not None:
                digest.add(name, tensor)
            yield name, tensor

    def noting(weights: Any) -> Any:
        found = load(passing(weights))
        loaded.update(found if found is not None else (name for name, _ in model.named_parameters()))
        return found

    model.load_weights = noting
    try:
        yield loaded
    finally:
        del model.load_weights  # the class's own is back
