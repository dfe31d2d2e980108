"""What runs inside a vLLM worker to take new weights; with `vllm_lora`, every word of vLLM's internals that we rely on.

vLLM imports this module in a worker before it loads the model there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from safetensors import safe_open

from policies.generation import vllm_lora
from policies.generation.orphans import end_with_parent
from policies.models.adapters import peft_names
from policies.models.weights import checksum, extend

vllm_lora.prepare()
end_with_parent()


class WeightSync:
    """Mixed into vLLM's worker (`worker_extension_cls`), reached through `collective_rpc`."""

    model_runner: Any

    def load_safetensors(self, path: str) -> tuple[int, list[str]]:
        """Reads a safetensors file of Hugging Face names into the running model.

        Only the path crosses the RPC. On a CPU, vLLM packs a tied `lm_head` at load time and `reload_weights` leaves
        the packed copy as it was, so every language-model head is processed again (vLLM 0.32).

        Returns:
            `checksum` of the tensors as read, and vLLM's names of the model's weights that none of them was put in.
        """
        import torch
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

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
            for module in model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)
        stale = sorted({name for name, _ in model.named_parameters()} - loaded)
        return read, stale

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


@contextmanager
def _noting_loaded(model: Any) -> Iterator[set[str]]:
    """Yields a set that gets the names of the weights that the model loads meanwhile; vLLM only logs those it lacks."""
    loaded: set[str] = set()
    load = model.load_weights

    def noting(weights: Any) -> Any:
        found = load(weights)
        loaded.update(found if found is not None else (name for name, _ in model.named_parameters()))
        return found

    model.load_weights = noting
    try:
        yield loaded
    finally:
        del model.load_weights  # the class's own is back
