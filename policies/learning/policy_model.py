"""A Hugging Face causal LM with a value head, and its frozen reference."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PreTrainedModel

from policies.compat.transformers import adapters_disabled, attn_implementation, can_switch_attention
from policies.learning.forward.checks import (
    IGNORES_PADDING,
    NOT_CAUSAL,
    OTHER_POSITIONS,
    OTHER_THAN_EAGER,
    move_last_row,
    own_logprobs,
    padded_rows,
    reject_difference,
    tree_difference,
)
from policies.learning.forward.logits import score_logits, token_logprobs
from policies.learning.forward.prefix_tree import ForwardCost, Layout, Paths, longest_pack
from policies.learning.forward.value_head import ValueHead, head_width
from policies.learning.rows import Rows, Scores
from policies.learning.sharding import copy_full, full_tensor, load_sharded, local_shard, shard, transformer_blocks
from policies.models.adapters import add_lora
from policies.models.families import LOGPROB_TOLERANCE, supports_prefix_trees
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

VALUE_HEAD = "value_head."
_RECOMPILE_LIMIT = 64  # variants of a block: policies, reference, with and without a mask, gradients or adapters
_BF16_TOLERANCE = 0.1  # nats by which bf16 may change the log-probability of a token on average


class PolicyModel(nn.Module):
    """One policy: a causal LM, with a critic a value head on its last hidden layer, and the shared frozen reference.

    It trains either all weights, in fp32, or an fp32 LoRA adapter on a frozen base.

    The reference and the LoRA base are the same model, held once per process for all policies. It is not part of the
    trainable weights, the state or weight sync.
    """

    def __init__(
        self,
        path: str,
        *,
        critic: bool = True,
        temperature: float = 1.0,
        dtype: str = "auto",
        device: str = "cpu",
        lora: Lora | None = None,
        quantization: Quantization = "none",
        gradient_checkpointing: bool = False,
        trust_remote_code: bool = False,
        max_length: int | None = None,
        reference: bool = True,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """Builds the LM and, with a critic, the value head.

        Args:
            dtype: compute type, `auto`, `bf16`, `fp32` or `fp64`; trained weights are fp32, with `fp64` fp64.
            device: where a LoRA base is loaded. A fully trained model is built on the CPU and moved by `to`.
            lora: the LoRA configuration; None: train all weights.
            gradient_checkpointing: recompute activations in the backward pass instead of keeping them.
            max_length: maximal number of tokens of a prompt and its response, which decides the attention used and
                longrope's factors; None: unknown.
            reference: whether `score` will be called with the reference. If not, a sharded model does not load it;
                others load it when they first use it.
            mesh: the processes over which the model and its reference are sharded; None: no sharding.
        """
        super().__init__()
        self.path = path
        self.trust_remote_code = trust_remote_code
        self.temperature = temperature
        self.critic = critic
        self.mesh = mesh
        self._dtype = dtype
        self._max_length = max_length
        self._reference: list[PreTrainedModel] = []  # a list: nn.Module must not register it
        self._compiles = False
        base_device = torch.device(device)
        forward_dtype, eager = compute_dtype(dtype, base_device), self._eager(base_device)
        frozen_dtype, master = base_dtype(dtype, base_device), master_dtype(forward_dtype)
        run_arguments: dict[str, Any] = {"eager": eager, "max_length": max_length}
        if mesh is not None:
            self.lm = init_empty(path, trust_remote_code, master if lora is None else frozen_dtype, **run_arguments)
            if lora is not None:
                self.lm = add_lora(self.lm.requires_grad_(False), lora)
        elif lora is None:
            self.lm = load_language_model(path, trust_remote_code, master, **run_arguments)
        else:
            base = shared_base(path, base_device, trust_remote_code, frozen_dtype, quantization, **run_arguments)
            self.lm = add_lora(base, lora)
            self._reference.append(base)
        if gradient_checkpointing:
            self.lm.gradient_checkpointing_enable({"use_reentrant": False})
        self.cost: ForwardCost | None = None
        """To choose how rows that share prefixes are packed; None: plain rows. Set by `check_forward`."""
        self._supports_logits_to_keep = "logits_to_keep" in inspect.signature(self.lm.forward).parameters
        if critic:
            self.value_head = ValueHead(head_width(self.lm)).to(master)
        if mesh is not None:
            self._shard(mesh, forward_dtype, reference)

    def _shard(self, mesh: DeviceMesh, forward_dtype: torch.dtype, has_reference: bool) -> None:
        """Shards the LM, the value head and the reference; with LoRA the reference is the LM itself."""
        has_base = any(not parameter.requires_grad for parameter in self.lm.parameters())  # stored in the compute type
        if self.critic:
            shard(self.value_head, [], mesh)  # stays in fp32
            register_fsdp_forward_method(self.value_head, "values")
        shard(self, transformer_blocks(self.lm), mesh, None if has_base else forward_dtype)
        register_fsdp_forward_method(self, "score")
        register_fsdp_forward_method(self, "score_reference")
        register_fsdp_forward_method(self, "own_logprobs")
        load_sharded(self.lm, self.path, self.trust_remote_code, mesh)
        if not has_reference:
            return
        reference = self.lm
        if not has_base:
            eager = self._eager(torch.device(mesh.device_type))
            reference = init_empty(
                self.path, self.trust_remote_code, forward_dtype, eager=eager, max_length=self._max_length
            ).requires_grad_(False)
            shard(reference, transformer_blocks(reference), mesh)
            load_sharded(reference, self.path, self.trust_remote_code, mesh)
        self._reference.append(reference)

    def _eager(self, device: torch.device) -> bool:
        """Whether the whole run uses eager attention: policy and reference, in scoring and in training."""
        return eager_is_faster(compute_dtype(self._dtype, device), device, self._max_length)

    def train(self, mode: bool = True) -> Self:
        """Sets the training mode; inside the LM, only on modules with gradient checkpointing.

        Some families compute differently in training mode even without dropout (PhiMoE samples its experts).
        """
        super().train(mode)
        for module in self.lm.modules():
            module.training = mode and getattr(module, "gradient_checkpointing", False)
        return self

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.lm.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The compute type: bf16 over fp32 master weights, or plain fp32."""
        return compute_dtype(self._dtype, self.device)

    def autocast(self) -> AbstractContextManager[None]:
        """Autocasts to the compute type, if it is bf16."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def reference(self) -> PreTrainedModel:
        """The frozen initial policy π_0 on this model's device.

        For a sharded model with LoRA it is the LM itself, which is π_0 inside `adapters_disabled`.
        """
        if not self._reference or next(self._reference[0].parameters()).device != self.device:
            forward_dtype = base_dtype(self._dtype, self.device)
            master = master_dtype(forward_dtype)
            linear_dtype = None if forward_dtype == master else forward_dtype
            base = shared_base(
                self.path,
                self.device,
                self.trust_remote_code,
                master,
                linear_dtype=linear_dtype,
                eager=self._eager(self.device),
                max_length=self._max_length,
            )
            if self._compiles:
                _compile_blocks(base)
            self._reference = [base]
        return self._reference[0]

    def compile_blocks(self) -> None:
        """Compiles the transformer blocks of policy and reference when they are first called, for rows of any length.

        `check_forward` comes before it: its variants, such as eager attention, would each be compiled.
        """
        self._compiles = True
        for lm in (self.lm, *self._reference):
            _compile_blocks(lm)

    def forward(
        self, rows: Rows, layout: Layout | None = None, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probabilities of the responses, the value before each response token, and the entropy there.

        Args:
            layout: how they are forwarded; None: as plain rows.
            with_entropy: compute the entropy, for a loss that has it as a term.

        Returns:
            `[B, R]` each, fp32; 0 outside the response mask. Values are None without a critic.
        """
        layout = self._layout(rows) if layout is None else layout
        logits, values = self._forward_layout(self.lm, layout, self.critic)
        tokens = rows.responses[layout.rows, layout.positions]
        logprobs, entropy = token_logprobs(logits, layout.sources, tokens, self.temperature, with_entropy)
        spread = partial(_spread, layout=layout, like=rows.mask)
        return (
            spread(logprobs),
            None if values is None else spread(values),
            None if entropy is None else spread(entropy),
        )

    @torch.no_grad()
    def score(self, rows: Rows, layout: Layout | None = None, *, reference: bool = True) -> Scores:
        """Everything about a batch that stays constant while PPO trains on it. The logits are freed here.

        Args:
            layout: how they are forwarded; None: as plain rows.
        """
        layout = self._layout(rows) if layout is None else layout
        policy, values = self._forward_layout(self.lm, layout, self.critic)
        reference_logits = self._forward_reference(layout) if reference else None
        tokens = rows.responses[layout.rows, layout.positions]
        scores = score_logits(policy, reference_logits, layout.sources, tokens, self.temperature)
        spread = partial(_spread, layout=layout, like=rows.mask)
        return replace(Scores(*map(spread, scores)), values=None if values is None else spread(values))

    @torch.no_grad()
    def score_reference(self, rows: Rows, layout: Layout) -> Tensor:
        """The reference's log-probabilities of the responses; `[B, R]`, fp32, 0 outside the response mask."""
        tokens = rows.responses[layout.rows, layout.positions]
        logprobs, _ = token_logprobs(self._forward_reference(layout), layout.sources, tokens, self.temperature)
        return _spread(logprobs, layout, rows.mask)

    def _forward_reference(self, layout: Layout) -> Tensor:
        lm = self.reference()
        with adapters_disabled(self.lm) if lm is self.lm else nullcontext():
            return self._forward_layout(lm, layout)[0]

    @torch.no_grad()
    def own_logprobs(self, row: Tensor, length: int) -> Tensor:
        """See `own_logprobs` in `forward/checks.py`; a sharded model must compute it in a method of this module."""
        with self.autocast():
            return own_logprobs(self.lm, row, length, self.temperature)

    @torch.no_grad()
    def check_forward(self, prefix_sharing: bool = True) -> None:
        """Checks the log-probabilities of two short rows, which a family's code may compute in an unexpected way.

        They must be the same alone and beside a longer row, by the model's own code (without our position ids, and
        without later tokens), and with eager attention, unless the family cannot switch to it. `SyncCheck` compares
        them with those of generation.
        fp32 weights are compared in fp32, since bf16 rounding would hide errors. Rows are forwarded as plain rows if
        log-probabilities differ in a prefix tree. All ranks must call it.
        """
        config = self.lm.config.get_text_config()
        rows = padded_rows(config.vocab_size, self._max_length)
        rows, first = rows.to(self.device), rows.trim(torch.tensor([0])).to(self.device)
        row = torch.cat([first.prompts, first.responses], dim=1)
        positions = min(self._max_length or 0, getattr(config, "max_position_embeddings", None) or 0)
        layout = move_last_row(self._layout(rows), positions)
        dtype, attention = self._dtype, attn_implementation(self.lm)
        if self.mesh is None and all(weight.dtype == torch.float32 for weight in self.lm.parameters()):
            self._dtype = "fp32"
        limit = _BF16_TOLERANCE if self.dtype == torch.bfloat16 else LOGPROB_TOLERANCE
        try:
            batch, single = self(rows, layout)[0], self(first)[0][0]
            own, beginning = (self.own_logprobs(row, length) for length in (row.shape[1], row.shape[1] - 3))
            eager = batch
            if attention != "eager" and can_switch_attention(self.lm):
                self.lm.set_attn_implementation("eager")
                eager = self(rows, layout)[0]
                self.lm.set_attn_implementation(attention)
            self.cost = None
            if prefix_sharing and supports_prefix_trees(self.lm.config, self._max_length):
                difference = tree_difference(lambda *tree: self(*tree)[0], config.vocab_size, self.device)
                if difference <= limit:
                    longest = longest_pack(attention == "eager", self._max_length)
                    self.cost = ForwardCost.from_config(self.lm.config, longest)
        finally:
            self._dtype = dtype
        mask, reject = rows.mask.bool(), partial(reject_difference, limit=limit, path=self.path)
        reject(beginning, own[: len(beginning)], NOT_CAUSAL)
        reject(single, own[-len(single) :], OTHER_POSITIONS)
        reject(batch[0][mask[0]], single, IGNORES_PADDING)
        reject(eager[mask], batch[mask], OTHER_THAN_EAGER.replace("ATTENTION", attention))

    def _layout(self, rows: Rows) -> Layout:
        """Plain rows."""
        paths = Paths(rows.to(torch.device("cpu")))
        return paths.layout(paths.plain()).to(self.device)

    def _forward_layout(
        self, lm: PreTrainedModel, layout: Layout, critic: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The logits `[K * num_logits, V]` in the compute type; and with the critic the value before each token, `[E]`.

        Position ids are a node's depth, because packs are padded on the left; GPT-2's absolute positions would be
        wrong otherwise. `logits_to_keep` leaves the logit scaling of each family to the model.
        """
        keep = {"logits_to_keep": layout.num_logits} if self._supports_logits_to_keep else {}
        hidden: list[Tensor] = []  # the last hidden states; `output_hidden_states` would keep those of every layer

        def keep_input(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden.append(inputs[0])
            return inputs[0].contiguous(), *inputs[1:]  # a matrix product with a slice is slower on a CPU

        head = lm.get_output_embeddings()
        with self.autocast(), head.register_forward_pre_hook(keep_input):
            out = lm(
                input_ids=layout.tokens,
                attention_mask=layout.attention_mask(lm.config, self.dtype),
                position_ids=layout.depths,
                use_cache=False,
                **keep,
            )
        logits = out.logits[:, -layout.num_logits :]
        if not self._supports_logits_to_keep:
            logits = logits.clone()  # lets the logits of the prompts be freed
        logits = logits.flatten(0, 1)
        if not critic:
            return logits, None
        states = hidden[0][:, -layout.num_logits :].flatten(0, 1)
        states = states.index_select(0, layout.sources).to(self.value_head.weight.dtype)
        return logits, self.value_head.values(states)

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The trainable weights, with their names."""
        return ((name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad)

    @contextmanager
    def temporary_weights(self) -> Iterator[None]:
        """A context in which the trainable weights may be changed; restores them at its end."""
        tensors = self.local_weights()
        backups = [tensor.clone() for tensor in tensors]
        try:
            yield
        finally:
            for tensor, backup in zip(tensors, backups, strict=True):
                tensor.copy_(backup)

    def local_weights(self) -> list[Tensor]:
        """This process's shards of the trainable weights, in the order of `trainable`, as views."""
        return [local_shard(parameter.detach()) for _, parameter in self.trainable()]

    def state(self) -> dict[str, np.ndarray]:
        """Copies of the trainable weights by name, fp32; tied weights appear once. All ranks must call it."""
        return {name: full_tensor(parameter.detach()).cpu().numpy().copy() for name, parameter in self.trainable()}

    def load(self, state: Mapping[str, np.ndarray], *, critic: bool = True) -> None:
        """Copies weights into the model, by name.

        Args:
            state: weights as from `state`.
        """
        with torch.no_grad():
            for name, parameter in self.trainable():
                if critic or not name.startswith(VALUE_HEAD):
                    copy_full(parameter, torch.from_numpy(np.array(state[name])))


def _compile_blocks(lm: PreTrainedModel) -> None:
    torch._dynamo.config.recompile_limit = _RECOMPILE_LIMIT  # beyond it, blocks would run uncompiled
    for block in transformer_blocks(lm, "torch_compile=false"):
        block.compile(dynamic=True)


def _spread(values: Tensor, layout: Layout, like: Tensor) -> Tensor:
    """Values of response tokens `[E]` as a matrix like the rows' mask `[B, R]`, 0 elsewhere."""
    return values.new_zeros(like.shape).index_put((layout.rows, layout.positions), values)
