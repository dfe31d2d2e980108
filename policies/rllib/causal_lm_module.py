"""A `PolicyModel` as an RLlib RLModule."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import InferenceOnlyAPI, ValueFunctionAPI
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor

from policies.learning.policy_model import VALUE_HEAD, PolicyModel
from policies.learning.rows import Rows
from policies.learning.sharding import learner_mesh
from policies.models.model_names import model_path
from policies.settings.settings import Settings


def module_config(settings: Settings, module_id: str) -> dict[str, Any]:
    """What the `CausalLMModule` of an LLM is told of the settings, as its `model_config`."""
    shards = settings.shards_per_policy or 1
    return {
        # Its name, from which each process finds it by itself: folders lie elsewhere on another machine.
        "model": settings.models[module_id],
        "critic": settings.critic,
        "critic_agents": settings.num_agents if settings.critic_inputs == "chain" else 0,
        "temperature": settings.temperature,
        "dtype": settings.dtype,
        "device": "cuda" if settings.gpus_per_learner else "cpu",
        "lora": settings.lora,
        "quantization": settings.quantization,
        "gradient_checkpointing": settings.gradient_checkpointing,
        "trust_remote_code": settings.trust_remote_code,
        "longest": settings.max_prompt + settings.max_response,
        **({"mesh": (len(settings.modules), shards)} if shards > 1 else {}),
    }


class CausalLMModule(TorchRLModule, InferenceOnlyAPI, ValueFunctionAPI):
    """One LLM of the chain. Its `model_config` is made by `module_config`."""

    def setup(self) -> None:
        """Builds the model; one that is for inference alone does without the value head."""
        told = {**self.model_config}
        path, mesh = model_path(told.pop("model")), told.pop("mesh", None)
        mesh = learner_mesh(*mesh, told["device"])["shard"] if mesh else None
        critic = told.pop("critic") and not self.inference_only
        self.policy = PolicyModel(path, **told, critic=critic, mesh=mesh)

    def _forward_train(self, batch: Rows, **kwargs: Any) -> dict[str, Tensor]:
        """Log-probabilities and, with a critic, values of the responses, with gradients; `[B, R]` each, fp32."""
        logprobs, values = self.policy(batch)
        return {Columns.ACTION_LOGP: logprobs} | ({} if values is None else {Columns.VF_PREDS: values})

    def _forward(self, batch: Rows, **kwargs: Any) -> dict[str, Tensor]:
        """As in training, without the values."""
        return {Columns.ACTION_LOGP: self.policy(batch)[0]}

    def compute_values(self, batch: Rows, embeddings: Tensor | None = None) -> Tensor:
        """The value before each response token, `[B, R]`."""
        values: Tensor = self.policy(batch)[1]
        return values

    def get_non_inference_attributes(self) -> list[str]:
        """Runners do without the value head, of which `setup` takes care."""
        return []

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        inference_only: bool = False,
        **kwargs: Any,
    ) -> dict[str, np.ndarray]:
        """The trainable weights by name, fp32; `inference_only` leaves the value head out."""
        state = self.policy.state()
        return {name: array for name, array in state.items() if not (inference_only and name.startswith(VALUE_HEAD))}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Copies weights in by name.

        Raises:
            KeyError: a weight of this module is missing from `state`.
        """
        self.policy.load(state)
