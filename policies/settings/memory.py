"""Estimates a learner's memory from its models' shapes and the settings: `micro_batch_tokens=auto`, and `cory plan`.

Weights, gradients, optimizer, reference and logits are computed, activations approximated; libraries and an allowance
on top are measured values (docs/lab/memory.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from policies.learning import offloaded_adam
from policies.learning.forward import logits
from policies.learning.sharding import transformer_blocks
from policies.models.adapters import linear_layers
from policies.models.language_model import base_dtype, compute_dtype, meta_model
from policies.models.model_check import attention_head_dim, check_tensor_parallel, num_kv_heads
from policies.settings.settings import Settings

LIBRARIES = {"learner": 0.4e9, "vllm": 0.7e9, "transformers": 0.4e9, "reward": 0.3e9}
"""Measured bytes of a process before it loads a model (benchmarks/README.md)."""
NF4 = 0.5
"""Bytes per weight in 4 bits."""
ALLOWANCE = 0.25
"""Fraction added for buffers, copies in flight and heap fragmentation."""
NORMS = 8.0
"""Bytes that the norms of a block save for the backward pass, per token and hidden unit."""


class ModelShape(NamedTuple):
    """Sizes of a model."""

    parameters: int
    block: int
    """Parameters of its largest block of layers; 0 without shards."""
    outside: int
    """Parameters outside of blocks: embeddings, head."""
    active: float
    """Parameters without embeddings and head that each token is multiplied with: of experts, those that it uses."""
    adapter: int
    """Parameters of one policy's adapter; 0 without one."""
    layers: int
    hidden: int
    vocabulary: int
    heads: int
    """Number of key and value heads."""
    head: int
    """Keys and values per token and head, over all layers."""


class Memory(NamedTuple):
    """Estimated bytes of one process."""

    device: str
    """`cpu` or `cuda`: location of the models."""
    parts: dict[str, float]
    """Bytes on the device by purpose; on each device if an engine is split over several."""
    host: float
    """Additional bytes in CPU memory."""

    @property
    def total(self) -> float:
        """Bytes on the device."""
        return sum(self.parts.values())


def model_shapes(settings: Settings) -> list[ModelShape]:
    """Returns the sizes of each trained LLM's model and then of each frozen model; does not load their weights."""
    paths = list(settings.model_paths.values())
    by_path = {path: _shape(path, settings) for path in dict.fromkeys(paths)}
    return [by_path[path] for path in paths]


def _shape(path: str, settings: Settings) -> ModelShape:
    model = meta_model(path, settings.trust_remote_code)
    config = model.config.get_text_config()
    check_tensor_parallel(config, settings.tensor_parallel_size)
    head = model.get_output_embeddings()
    adapter = 0
    if settings.lora is not None:
        targets = settings.lora.targets or linear_layers(model)
        for name, layer in model.named_modules():
            is_target = isinstance(layer, nn.Linear | Conv1D) and name.rpartition(".")[2] in targets
            adapter += settings.lora.rank * sum(layer.weight.shape) if is_target and layer is not head else 0
    parameters = _count(model)
    blocks = [_count(block) for block in transformer_blocks(model)] if (settings.shards_per_policy or 1) > 1 else [0]
    used_experts = getattr(config, "num_experts_per_tok", None) or 0
    stacks = [stack for stack in model.parameters() if stack.ndim == 3] if used_experts else []  # one per expert layer
    copies = 1 if settings.lora else 2  # trained experts also keep their inputs, and compute in fp32
    embeddings = {id(module.weight): module.weight.numel() for module in (model.get_input_embeddings(), head) if module}
    return ModelShape(
        parameters=parameters,
        block=max(blocks),
        outside=parameters - sum(blocks),
        active=parameters
        - sum(embeddings.values())
        - sum(stack.numel() * (1 - copies * used_experts / len(stack)) for stack in stacks),
        adapter=adapter,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        heads=num_kv_heads(config),
        head=2 * config.num_hidden_layers * attention_head_dim(config),
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def estimate_learner(settings: Settings, models: Sequence[ModelShape]) -> Memory:
    """Estimates the memory of a process that learns: the driver or a learner.

    Args:
        models: from `model_shapes`.
    """
    device = torch.device("cuda" if settings.gpus_per_learner else "cpu")
    size, shards = bytes_per_number(settings, device), settings.shards_per_policy or 1
    names = list(settings.models.values())
    models = models[: len(names)]  # without frozen models
    if settings.shards_per_policy is not None:  # each learner has one LLM or a shard of it
        models, names = [max(models, key=lambda model: model.parameters)], names[:1]
    if settings.lora is None:
        trained = [model.parameters for model in models]
        references = dict(zip(names, models, strict=True)).values()
        reference_bytes = float(size) if device.type == "cuda" or shards > 1 else 4.0
        parts = {"weights": 4.0 * sum(trained)}
        if settings.evaluates_with_reference:
            parts["reference"] = reference_bytes * sum(model.parameters for model in references)
    else:
        trained = [model.adapter for model in models]
        base = "base and reference" if settings.evaluates_with_reference else "base"
        parts = {base: base_bytes(settings, models[0], device), "adapters": 4.0 * sum(trained)}
    adam = 8.0 * sum(trained) / shards
    parts["gradients"] = 4.0 * max(trained)  # LLMs learn one after another
    parts = {name: part / shards for name, part in parts.items()}
    if settings.offload_optimizer:
        parts["Adam chunk"] = 8.0 * min(offloaded_adam.CHUNK_WEIGHTS, max(trained) / shards)
    else:
        parts["Adam"] = adam
    if shards > 1:
        gathered = models[0].outside + 2 * models[0].block  # the next block is prefetched
        base_size = base_dtype(settings.dtype, device).itemsize
        gradients = 4.0 * (models[0].outside + models[0].block)
        parts["unsharded blocks"] = float(base_size * gathered) if settings.lora else size * gathered + gradients
    elif size == 2 and (settings.lora is None or device.type == "cpu"):
        parts["bf16 copy"] = 2.0 * max(model.active for model in models)  # autocast's, of the policy that is learning
    stored = size if settings.lora and device.type == "cuda" else 4  # bytes of residuals; those of adapters are cast
    parts["activations"] = max(_activations(settings, model, size, stored) for model in models)
    parts["logits"] = max(_logits(settings, model, device, size) for model in models)
    memory = with_overhead(parts, device, LIBRARIES["learner"])
    if device.type == "cpu":
        return memory
    # A checkpoint copies all weights and moments, and one LLM's moments again when it writes them.
    copied = (12.0 * sum(trained) + 8.0 * max(trained)) / shards
    return memory._replace(host=memory.host + copied + (adam if settings.offload_optimizer else 0.0))


def _activations(settings: Settings, model: ModelShape, size: int, stored: int) -> float:
    """Bytes that the forward pass of the longest micro-batch saves for the backward pass, without logits.

    A matrix with n outputs saves about 2 n values per token: the outputs, and those of the next function. As most
    matrices have `hidden` inputs or as many outputs, the n of all are about the parameters / `hidden`. With
    `gradient_checkpointing`, only the inputs of all blocks and the activations of one are kept.
    """
    block = 2.0 * size * model.active / model.hidden / model.layers + NORMS * model.hidden
    inputs = float(stored * model.hidden * model.layers)
    per_token = inputs + block if settings.gradient_checkpointing else block * model.layers
    return _rows(settings) * settings.max_length * per_token


def _rows(settings: Settings) -> int:
    """Maximum number of full-length rows in a micro-batch."""
    rows = min(settings.micro_batch_size, -(-settings.responses_per_step // settings.ranks))
    if settings.micro_batch_limit is None:
        return rows
    return min(rows, max(settings.micro_batch_limit // settings.max_length, 1))


def _logits(settings: Settings, model: ModelShape, device: torch.device, size: int) -> float:
    """Bytes of logits, their gradient, and a part of them in fp32."""
    positions = _rows(settings) * (settings.max_response_tokens + 1)
    if settings.micro_batch_limit is not None:  # rows that share their prompt have more response tokens
        most = settings.micro_batch_size * (settings.max_response_tokens + 1)
        positions = max(positions, min(settings.micro_batch_limit, most))
    count = float(positions * model.vocabulary)
    return 2.0 * size * count + 4.0 * min(count, logits.CHUNK_LOGITS[device.type])


def base_bytes(settings: Settings, model: ModelShape, device: torch.device) -> float:
    """Bytes of the frozen base of adapters."""
    if settings.quantization != "none":
        return NF4 * model.parameters
    on_gpu = device.type == "cuda"
    stored = bytes_per_number(settings, device) if on_gpu else base_dtype(settings.dtype, device).itemsize
    return float(stored * model.parameters)


def bytes_per_number(settings: Settings, device: torch.device) -> int:
    """Bytes per number in the compute type; `auto` counts as bf16 if the GPU is on another machine."""
    if device.type == "cuda" and settings.dtype == "auto" and not torch.cuda.is_available():
        return 2
    return compute_dtype(settings.dtype, device).itemsize


def with_overhead(parts: dict[str, float], device: torch.device, libraries: float) -> Memory:
    """Returns a process's memory with its libraries and the allowance."""
    if device.type == "cpu":
        parts["libraries"] = libraries
    parts["allowance"] = ALLOWANCE * sum(parts.values())
    parts = {name: size for name, size in parts.items() if size}
    return Memory(device.type, parts, 0.0 if device.type == "cpu" else libraries)
