"""A Hugging Face causal LM with a value head, as an RLlib RLModule."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any, Self

import numpy as np
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import InferenceOnlyAPI, ValueFunctionAPI
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor, nn
from transformers import PreTrainedModel

from policies.learning import token_ppo
from policies.learning.rows import Rows
from policies.models.adapters import adapted
from policies.models.language_model import base_dtype, choose_attention, compute_dtype, load_language_model, shared_base
from policies.models.lora import Lora
from policies.models.model_names import model_path
from policies.settings.settings import Settings

SCORES = ("logprobs", "reference_logprobs", "entropy", "full_kl")
"""What `CausalLMModule.score` gives; with a critic `values` too."""


def module_config(settings: Settings) -> dict[str, Any]:
    """What a `CausalLMModule` is told of the settings, as its `model_config`."""
    return {
        "model": settings.model,  # each process finds it by itself: folders lie elsewhere on another machine
        "trust_remote_code": settings.trust_remote_code,
        "dtype": settings.dtype,
        "temperature": settings.temperature,
        "device": "cuda" if settings.gpus_per_learner else "cpu",  # where a base is loaded
        "lora": settings.lora,
        "quantization": settings.quantization,
        "gradient_checkpointing": settings.gradient_checkpointing,
        "critic": settings.critic,
    }


class CausalLMModule(TorchRLModule, InferenceOnlyAPI, ValueFunctionAPI):
    """One LLM of the chain, with a value head on the last hidden layer (if there is a critic) and the shared frozen
    reference.

    It owns its weights in one of two ways: all of them, in fp32; or an fp32 adapter on a frozen base (LoRA).

    Its `model_config` is made by `module_config`.

    The reference and the base, which are one model, are held once per process for all policies: absent from what is
    trained, from the state, from checkpoints and from weight sync.
    """

    def setup(self) -> None:
        """Builds the LM and, for a learner with a critic, the value head, which starts at zero."""
        self.path = model_path(self.model_config["model"])
        self.trust_remote_code = bool(self.model_config["trust_remote_code"])
        self.temperature = float(self.model_config["temperature"])
        self.critic = bool(self.model_config["critic"])
        self._reference: list[PreTrainedModel] = []  # a list: nn.Module must not register it
        lora: Lora | None = self.model_config["lora"]
        if lora is None:
            self.lm = load_language_model(self.path, self.trust_remote_code)
        else:
            device = torch.device(self.model_config["device"])
            dtype = base_dtype(self.model_config["dtype"], device)
            quantization = self.model_config["quantization"]
            base = shared_base(self.path, device, self.trust_remote_code, dtype, quantization)
            self.lm = adapted(base, lora)
            self._reference.append(base)
        if self.model_config["gradient_checkpointing"]:
            self.lm.gradient_checkpointing_enable({"use_reentrant": False})
        self._keeps_logits = "logits_to_keep" in inspect.signature(self.lm.forward).parameters
        if self.critic and not self.inference_only:
            hidden = self.lm.config.get_text_config().hidden_size
            self.value_head = nn.Linear(hidden, 1)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)

    def train(self, mode: bool = True) -> Self:
        """Switches the mode, which in the LM only gradient checkpointing may see.

        Some families compute otherwise in train mode, whatever their dropout (PhiMoE then draws its experts at random).
        """
        super().train(mode)
        for module in self.lm.modules():
            module.training = mode and getattr(module, "gradient_checkpointing", False)
        return self

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.lm.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The compute type: bf16 over fp32 master weights, or plain fp32."""
        return compute_dtype(str(self.model_config["dtype"]), self.device)

    def autocast(self) -> AbstractContextManager[None]:
        """Computes in the compute type."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def reference(self) -> PreTrainedModel:
        """The frozen initial policy pi_0 on this module's device."""
        if not self._reference or next(self._reference[0].parameters()).device != self.device:
            self._reference = [shared_base(self.path, self.device, self.trust_remote_code)]
        return self._reference[0]

    def _forward_train(self, batch: Rows, **kwargs: Any) -> dict[str, Tensor]:
        """Log-probabilities and, with a critic, values of the responses, with gradients.

        Returns:
            `ACTION_LOGP` and `VF_PREDS`, `[B, R]` each, fp32; meaningless outside the response mask.
        """
        logits, values = self._respond(self.lm, batch, with_values=self.critic)
        logprobs = {Columns.ACTION_LOGP: token_ppo.token_logprobs(logits, batch["responses"])}
        return logprobs | {Columns.VF_PREDS: values} if self.critic else logprobs

    def _forward(self, batch: Rows, **kwargs: Any) -> dict[str, Tensor]:
        """As in training, without the value head."""
        logits, _ = self._respond(self.lm, batch, with_values=False)
        return {Columns.ACTION_LOGP: token_ppo.token_logprobs(logits, batch["responses"])}

    def compute_values(self, batch: Rows, embeddings: Tensor | None = None) -> Tensor:
        """The value before each response token, `[B, R]`."""
        return self._respond(self.lm, batch, with_values=True)[1]

    @torch.no_grad()
    def score(self, batch: Rows) -> dict[str, Tensor]:
        """Everything about a batch that does not change while PPO trains on it.

        Returns:
            `[B, R]` each, fp32: `logprobs`, `reference_logprobs`, `entropy`, and `full_kl`, the KL to the reference
            over the whole vocabulary; with a critic `values` too. Logits die here.
        """
        logits, values = self._respond(self.lm, batch, with_values=self.critic)
        policy = logits.log_softmax(-1)
        del logits  # [B, R, V] each: with a large vocabulary these are the largest tensors of an update
        reference = self._respond(self.reference(), batch, with_values=False)[0].log_softmax(-1)
        logprobs, reference_logprobs, entropy, full_kl = token_ppo.compare(policy, reference, batch["responses"])
        scores = dict(zip(SCORES, (logprobs, reference_logprobs, entropy, full_kl), strict=True))
        return scores | {"values": values} if self.critic else scores

    def _respond(self, lm: PreTrainedModel, batch: Rows, with_values: bool) -> tuple[Tensor, Tensor]:
        """Logits `[B, R, V]` (divided by the temperature) that predicted each response token, and values `[B, R]`.

        Prompts are padded on the left and responses on the right, so positions are counted from the mask: GPT-2's
        absolute positions would otherwise be off. `logits_to_keep` leaves each family's logit scaling to the model.
        """
        responses = batch["responses"]
        length = responses.shape[1]
        tokens = torch.cat([batch["prompts"], responses], dim=1)  # (B, P + R)
        mask = torch.cat([batch["prompt_mask"], batch["mask"].long()], dim=1)
        choose_attention(lm, self.dtype, tokens.shape[1])
        keep = {"logits_to_keep": length + 1} if self._keeps_logits else {}
        seen: list[Tensor] = []  # the last hidden states; `output_hidden_states` would keep those of every layer
        head = lm.get_output_embeddings()
        with self.autocast(), head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])):
            out = lm(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=(mask.cumsum(1) - 1).clamp(min=0),
                use_cache=False,
                **keep,
            )
        logits = out.logits[:, -length - 1 : -1].float() / self.temperature
        if not with_values:
            return logits, torch.empty(0)
        return logits, self.value_head(seen[0][:, -length - 1 : -1].float()).squeeze(-1)

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The weights that are the policy's own, with their names."""
        return ((name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad)

    def get_non_inference_attributes(self) -> list[str]:
        """Runners do without the value head."""
        return ["value_head"]

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        inference_only: bool = False,
        **kwargs: Any,
    ) -> dict[str, np.ndarray]:
        """The trainable weights by name, fp32; tied weights appear once; `inference_only` leaves the value head out."""
        return {
            name: parameter.detach().cpu().numpy().copy()
            for name, parameter in self.trainable()
            if not (inference_only and name.startswith("value_head."))
        }

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Copies weights in by name.

        Raises:
            KeyError: a weight of this module is missing from `state`.
        """
        with torch.no_grad():
            for name, parameter in self.trainable():
                parameter.copy_(torch.from_numpy(np.array(state[name])))
