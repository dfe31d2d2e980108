"""A `PolicyModel` as an RLlib RLModule."""

from __future__ import annotations

from typing import Any

from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor

from policies.learning.policy_model import PolicyModel
from policies.learning.rows import Rows
from policies.learning.sharding import learner_mesh
from policies.models.model_names import model_path
from policies.settings.settings import Settings


def module_config(settings: Settings, policy_id: str) -> dict[str, Any]:
    """The `model_config` of a policy's `CausalLMModule`."""
    shards = settings.shards_per_policy or 1
    return {
        # A name, not a path: each process resolves it, since folders differ between machines.
        "model": settings.models[policy_id],
        "reference": settings.evaluates_with_reference,
        "critic": settings.critic,
        "temperature": settings.temperature,
        "dtype": settings.dtype,
        "device": "cuda" if settings.gpus_per_learner else "cpu",
        "lora": settings.lora,
        "quantization": settings.quantization,
        "gradient_checkpointing": settings.gradient_checkpointing,
        "trust_remote_code": settings.trust_remote_code,
        "max_length": settings.max_length,
        **({"mesh": (len(settings.policy_ids), shards)} if shards > 1 else {}),
    }


class CausalLMModule(TorchRLModule):
    """One policy as an RLModule. Its `model_config` comes from `module_config`."""

    def setup(self) -> None:
        """Builds the model."""
        config = {**self.model_config}
        path, mesh = model_path(config.pop("model")), config.pop("mesh", None)
        mesh = learner_mesh(*mesh, config["device"])["shard"] if mesh else None
        self.policy = PolicyModel(path, **config, mesh=mesh)

    def _forward(self, batch: Rows, **kwargs: Any) -> dict[str, Tensor]:
        """Log-probabilities and, with a critic, values of the responses; `[B, R]` each, fp32."""
        logprobs, values, _ = self.policy(batch)
        return {Columns.ACTION_LOGP: logprobs} | ({} if values is None else {Columns.VF_PREDS: values})
