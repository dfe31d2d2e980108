"""What runs inside a vLLM worker to take new weights; every word of vLLM's internals that we rely on is in this
file.
"""

from __future__ import annotations

from typing import Any

from safetensors import safe_open

from policies.generator import checksum


class WeightSync:
    """Mixed into vLLM's worker (`worker_extension_cls`), reached through `collective_rpc`."""

    model_runner: Any

    def load_safetensors(self, path: str) -> int:
        """Reads a safetensors file of Hugging Face names into the running model.

        Only the path crosses the RPC. On a CPU, vLLM packs a tied `lm_head` at load time and `reload_weights` leaves
        the packed copy as it was, so every language-model head is processed again (vLLM 0.32).

        Returns:
            `checksum` of the tensors as read.
        """
        import torch
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is not a dict)
        with torch.inference_mode():
            self.model_runner.reload_weights(weights_iterator=iter(tensors.items()), is_checkpoint_format=True)
            for module in self.model_runner.get_model().modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)
        return checksum({name: tensor.float().numpy() for name, tensor in tensors.items()})
