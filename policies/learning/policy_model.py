"""A Hugging Face causal LM with a value head, and the frozen reference beside it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PreTrainedModel

from policies.compat.transformers import attention_of, without_adapters
from policies.learning.logits import scores, token_logprobs
from policies.learning.rows import Rows, make_rows, trimmed
from policies.learning.sharding import blocks_of, fill, local, put, shard, whole
from policies.models.adapters import add_lora
from policies.models.families import LIMIT
from policies.models.language_model import (
    Quantization,
    base_dtype,
    compute_dtype,
    eager_is_faster,
    init_empty,
    load_language_model,
    master_dtype,
    shared_base,
)
from policies.models.lora import Lora
from policies.models.model_check import ModelError

SCORES = ("logprobs", "reference_logprobs", "entropy", "full_kl")
"""What `PolicyModel.score` gives; with a critic `values` too."""
VALUE_HEAD = "value_head."
_ROUNDING = 0.1  # nats by which bf16 may change a token's log-probability, in the mean


class ValueHead(nn.Linear):
    """The critic: linear in the last hidden state; all of it starts at zero.

    One that knows of the chain (a centralised critic: training alone, the policy sees nothing of it) has beside it, for
    each role, a value of its own and a weight of each earlier response's task reward.
    """

    def __init__(self, hidden: int, agents: int) -> None:
        """Takes the width of the hidden states, and the agents whose rewards and roles it knows of; 0: none."""
        super().__init__(hidden, 1)
        self.agents = agents
        if agents:
            self.of_role = nn.Parameter(torch.zeros(agents))
            self.of_earlier = nn.Parameter(torch.zeros(agents, agents - 1))
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def values(self, hidden: Tensor, rows: Rows) -> Tensor:
        """The value before each response token.

        Args:
            hidden: `[B, R, H]`, fp32.
            rows: the same responses; for one that knows of the chain their `positions` and `earlier_rewards`.

        Returns:
            `[B, R]`.
        """
        values = F.linear(hidden, self.weight, self.bias).squeeze(-1)  # a call would end its being whole (FSDP)
        if not self.agents:
            return values
        positions, earlier = rows["positions"], rows["earlier_rewards"]
        earlier = F.pad(earlier, (0, self.agents - 1 - earlier.shape[1]))  # an evaluation may be of fewer agents
        known = self.of_role[positions] + (self.of_earlier[positions] * earlier).sum(1)
        return values + known.unsqueeze(1)


class PolicyModel(nn.Module):
    """One LLM, with a value head on the last hidden layer (if there is a critic) and the shared frozen reference.

    It owns its weights in one of two ways: all of them, in fp32; or an fp32 adapter on a frozen base (LoRA).

    The reference and the base, which are one model, are held once per process for all policies: absent from what is
    trained, from the state and from weight sync.
    """

    def __init__(
        self,
        path: str,
        *,
        critic: bool = True,
        critic_agents: int = 0,
        temperature: float = 1.0,
        dtype: str = "auto",
        device: str = "cpu",
        lora: Lora | None = None,
        quantization: Quantization = "none",
        gradient_checkpointing: bool = False,
        trust_remote_code: bool = False,
        longest: int | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """Builds the LM and, for a critic, the value head, which starts at zero.

        Args:
            path: a folder or hub id.
            critic: whether there is a value head.
            critic_agents: agents of the chain of whose rewards and roles it knows; 0: it sees tokens alone.
            temperature: divides the logits.
            dtype: compute type, `auto`, `bf16`, `fp32` or `fp64`; trained weights are fp32, or fp64 with that.
            device: where a base is loaded. A model that owns all its weights is built on the CPU and moved by `to`.
            lora: what its adapter is like; None: it owns all its weights.
            quantization: of the base.
            gradient_checkpointing: compute activations again in the backward pass instead of keeping them.
            trust_remote_code: run code that comes with the model.
            longest: tokens of the longest prompt and response together, by which attention is chosen; None: unknown.
            mesh: the processes over which it is split, with its reference; None: this one holds it whole.

        Raises:
            ModelError: nothing loadable there, or it cannot be split.
        """
        super().__init__()
        self.path = path
        self.trust_remote_code = trust_remote_code
        self.temperature = temperature
        self.critic = critic
        self.mesh = mesh
        self._dtype = dtype
        self._longest = longest
        self._reference: list[PreTrainedModel] = []  # a list: nn.Module must not register it
        where = torch.device(device)
        computed, stored, eager = compute_dtype(dtype, where), base_dtype(dtype, where), self._eager(where)
        master = master_dtype(computed)
        if mesh is not None:
            self.lm = init_empty(path, trust_remote_code, master if lora is None else stored)
            if lora is not None:
                self.lm = add_lora(self.lm.requires_grad_(False), lora)
        elif lora is None:
            self.lm = load_language_model(path, trust_remote_code, master)
        else:
            base = shared_base(path, where, trust_remote_code, stored, quantization, eager=eager)
            self.lm = add_lora(base, lora)
            self._reference.append(base)
        if eager:
            self.lm.set_attn_implementation("eager")
        if gradient_checkpointing:
            self.lm.gradient_checkpointing_enable({"use_reentrant": False})
        self._keeps_logits = "logits_to_keep" in inspect.signature(self.lm.forward).parameters
        if critic:
            self.value_head = ValueHead(_head_width(self.lm), critic_agents).to(master)
        if mesh is not None:
            self._split(mesh, computed)

    def _split(self, mesh: DeviceMesh, computed: torch.dtype) -> None:
        """Leaves this process its part of the LM, and of its reference, which of an adapted LM is the LM itself."""
        base = any(not parameter.requires_grad for parameter in self.lm.parameters())  # which is stored as it computes
        if self.critic:
            shard(self.value_head, [], mesh)  # stays in fp32
            register_fsdp_forward_method(self.value_head, "values")
        shard(self, blocks_of(self.lm), mesh, None if base else computed)
        register_fsdp_forward_method(self, "score")
        fill(self.lm, self.path, self.trust_remote_code, mesh)
        reference = self.lm
        if not base:
            reference = init_empty(self.path, self.trust_remote_code, computed).requires_grad_(False)
            if self._eager(torch.device(mesh.device_type)):
                reference.set_attn_implementation("eager")
            shard(reference, blocks_of(reference), mesh)
            fill(reference, self.path, self.trust_remote_code, mesh)
        self._reference.append(reference)

    def _eager(self, device: torch.device) -> bool:
        """Whether attention is eager in all of the run: for policy and reference, in scoring and training."""
        return eager_is_faster(compute_dtype(self._dtype, device), device, self._longest)

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
        return compute_dtype(self._dtype, self.device)

    def autocast(self) -> AbstractContextManager[None]:
        """Computes in the compute type."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def reference(self) -> PreTrainedModel:
        """The frozen initial policy pi_0 on this model's device; of one that is split and adapted, the LM itself, which
        is pi_0 `without_adapters`.
        """
        if not self._reference or next(self._reference[0].parameters()).device != self.device:
            computed = base_dtype(self._dtype, self.device)
            master = master_dtype(computed)
            matrices = None if computed == master else computed
            eager = self._eager(self.device)
            self._reference = [
                shared_base(self.path, self.device, self.trust_remote_code, master, matrices=matrices, eager=eager)
            ]
        return self._reference[0]

    def forward(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the responses and, with a critic, the value before each of their tokens.

        Returns:
            `[B, R]` each, fp32; meaningless outside the response mask.
        """
        logits, values = self._respond(self.lm, rows, self.critic)
        # FSDP's hooks are on what is returned, and a view of that would pass them by.
        return token_logprobs(logits, rows["responses"], self.temperature), None if values is None else values.clone()

    @torch.no_grad()
    def score(self, rows: Rows) -> dict[str, Tensor]:
        """Everything about a batch that does not change while PPO trains on it.

        Returns:
            `[B, R]` each, fp32: `logprobs`, `reference_logprobs`, `entropy`, and `full_kl`, the KL to the reference
            over the whole vocabulary; with a critic `values` too. Logits die here.
        """
        policy, values = self._respond(self.lm, rows, self.critic)
        reference = self.reference()
        with without_adapters(self.lm) if reference is self.lm else nullcontext():
            reference_logits, _ = self._respond(reference, rows, with_values=False)
        scored = dict(zip(SCORES, scores(policy, reference_logits, rows["responses"], self.temperature), strict=True))
        return scored if values is None else scored | {"values": values}

    @torch.no_grad()
    def check_forward(self) -> None:
        """Compares log-probabilities of one batch: with each row alone, and with the eager attention.

        A family may ignore padding, and an attention kernel what the model's definition has beside its masks. Weights
        that are fp32 are compared in fp32, as bf16's rounding hides much. All ranks must call it alike.

        Raises:
            ModelError: they differ by more than rounding.
        """
        size = self.lm.config.get_text_config().vocab_size
        longer = 24 if self._longest is None else max(min(24, self._longest - 8), 4)
        prompts, responses = [_tokens(3, size), _tokens(longer, size)], [_tokens(8, size), _tokens(6, size)]
        rows = make_rows(prompts, responses, [[0.0] * len(each) for each in responses], [0.0] * 2, [False] * 2)
        rows = {name: column.to(self.device) for name, column in rows.items()}
        dtype, attention = self._dtype, attention_of(self.lm)
        if self.mesh is None and all(weight.dtype == torch.float32 for weight in self.lm.parameters()):
            self._dtype = "fp32"
        limit = _ROUNDING if self.dtype == torch.bfloat16 else LIMIT
        try:
            batch = self(rows)[0]
            alone = self(trimmed(rows, torch.tensor([0], device=self.device)))[0]
            self.lm.set_attn_implementation("eager")
            eager = self(rows)[0] if attention != "eager" else batch
        finally:
            self._dtype = dtype
            self.lm.set_attn_implementation(attention)
        difference = float((batch[0] - alone[0]).abs().mean())
        if not difference <= limit:
            raise ModelError(
                f"`{self.path}`: a row in a batch with a longer prompt gets other log-probabilities than alone (by "
                f"{difference:.2g} nats, allowed {limit:g}): its code ignores padding or positions. Set model to one "
                "of another family."
            )
        difference = float((eager - batch).abs()[rows["mask"].bool()].mean())
        if not difference <= limit:
            raise ModelError(
                f"`{self.path}`: {attention} attention gives other log-probabilities than its definition, the eager "
                f'one (by {difference:.2g} nats, allowed {limit:g}). Put "attn_implementation": "eager" into its '
                "config.json."
            )

    def _respond(self, lm: PreTrainedModel, rows: Rows, with_values: bool) -> tuple[Tensor, Tensor | None]:
        """Logits `[B, S, V]`, in the compute type, and the values `[B, R]` before each response token.

        Of S positions the last R + 1 are those of the response tokens and what comes after them.

        Prompts are padded on the left and responses on the right, so positions are counted from the mask: GPT-2's
        absolute positions would otherwise be off. `logits_to_keep` leaves each family's logit scaling to the model.
        """
        responses = rows["responses"]
        length = responses.shape[1]
        tokens = torch.cat([rows["prompts"], responses], dim=1)  # (B, P + R)
        mask = torch.cat([rows["prompt_mask"], rows["mask"].long()], dim=1)
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
        logits = out.logits if self._keeps_logits else out.logits[:, -length - 1 :].clone()  # drops those of prompts
        if not with_values:
            return logits, None
        return logits, self.value_head.values(seen[0][:, -length - 1 : -1].to(self.value_head.weight.dtype), rows)

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The weights that are the policy's own, with their names."""
        return ((name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad)

    @contextmanager
    def temporary_weights(self) -> Iterator[None]:
        """Puts the present weights back afterwards."""
        tensors = self.own()
        present = [tensor.clone() for tensor in tensors]
        try:
            yield
        finally:
            for tensor, kept in zip(tensors, present, strict=True):
                tensor.copy_(kept)

    def own(self) -> list[Tensor]:
        """What this process has of the trainable weights, in the order of `trainable`; writing to it changes them."""
        return [local(parameter.detach()) for _, parameter in self.trainable()]

    def state(self) -> dict[str, np.ndarray]:
        """The trainable weights by name, fp32, as copies; tied weights appear once. All ranks must ask alike."""
        return {name: whole(parameter.detach()).cpu().numpy().copy() for name, parameter in self.trainable()}

    def load(self, state: Mapping[str, np.ndarray], *, critic: bool = True) -> None:
        """Copies weights in by name, with `critic` those of the value head too.

        Raises:
            KeyError: a weight of this model is missing from `state`.
        """
        with torch.no_grad():
            for name, parameter in self.trainable():
                if critic or not name.startswith(VALUE_HEAD):
                    put(parameter, torch.from_numpy(np.array(state[name])))


def _tokens(count: int, vocabulary: int) -> list[int]:
    """Tokens to compare rows with; any do."""
    return [(11 * count + 7 * place) % vocabulary for place in range(count)]


def _head_width(lm: PreTrainedModel) -> int:
    """Width of the hidden states that go into an LM's output head; OPT-350m projects them down before it."""
    return int(lm.get_output_embeddings().weight.shape[1])
