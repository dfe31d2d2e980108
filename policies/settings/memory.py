"""Estimates the memory of each process of a run from the model's shape and the settings.

Weights, gradients, optimizer, reference, activations, logits and KV caches are computed; libraries and an allowance on
top are measured values (docs/plan.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import FastGELUActivation, NewGELUActivation
from transformers.pytorch_utils import Conv1D

from policies.generation.vllm_generator import BLOCK_TOKENS
from policies.learning import offloaded_adam
from policies.learning.forward import logits
from policies.learning.forward.prefix_tree import longest_pack
from policies.learning.sharding import transformer_blocks
from policies.models.adapters import linear_layers
from policies.models.families import supports_prefix_trees
from policies.models.language_model import base_dtype, compute_dtype, eager_is_faster, meta_model
from policies.models.model_check import attention_head_dim, check_tensor_parallel, num_kv_heads
from policies.settings.settings import Settings

LIBRARIES = {"learner": 0.4e9, "vllm": 0.7e9, "transformers": 0.4e9, "reward": 0.3e9}
"""Measured bytes of a process before it loads a model (benchmarks/README.md)."""
NF4 = 0.5
"""Bytes per weight in 4 bits."""
ALLOWANCE = 0.25
"""Fraction added for buffers, copies in flight and heap fragmentation."""
NORM, FROZEN_NORM = 8.0, 4.0
"""Bytes that a norm saves for its backward pass, per token and unit, besides its output."""


class ModelShape(NamedTuple):
    """Sizes of a model."""

    parameters: int
    block: int
    """Parameters of its largest block of layers."""
    outside: int
    """Parameters outside of blocks: embeddings, head."""
    cast: int
    """Parameters of linear layers, which autocast casts, without a head tied to the embedding."""
    adapter: int
    """Parameters of one policy's adapter; 0 without one."""
    saved: float
    """Values per token that all blocks save for their backward pass, without norms."""
    experts: float
    """Half of those of experts stored in one tensor, which autocast leaves in fp32."""
    norms: float
    """Units of all norms; half the units of a `LayerNorm`, which is one kernel."""
    layers: int
    hidden: int
    vocabulary: int
    queries: int
    """Number of query heads."""
    heads: int
    """Number of key and value heads."""
    head: int
    """Keys and values per token and head, over all layers."""
    tree_masks: int = 0
    """Kinds of attention masks of prefix trees; 0: every row is computed by itself."""


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
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear | Conv1D)}
    shares_prefixes = supports_prefix_trees(model.config, settings.max_length)
    adapter = 0
    if settings.lora is not None:
        targets, head = settings.lora.targets or linear_layers(model), model.get_output_embeddings()
        layers = [layer for name, layer in linear.items() if name.rpartition(".")[2] in targets and layer is not head]
        adapter = settings.lora.rank * sum(sum(layer.weight.shape) for layer in layers)
    parameters = _count(model)
    tied = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)}
    blocks = [_count(block) for block in transformer_blocks(model)] if (settings.shards_per_policy or 1) > 1 else [0]
    return ModelShape(
        parameters=parameters,
        block=max(blocks),
        outside=parameters - sum(blocks),
        cast=sum(_count(layer) for layer in linear.values() if id(layer.weight) not in tied),
        adapter=adapter,
        **_saved_activations(model, config),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        queries=getattr(config, "num_attention_heads", 0),
        heads=num_kv_heads(config),
        head=2 * config.num_hidden_layers * attention_head_dim(config),
        tree_masks=len(set(getattr(config, "layer_types", None) or [""])) if shares_prefixes else 0,
    )


def _saved_activations(model: PreTrainedModel, config: PreTrainedConfig) -> dict[str, Any]:
    """Returns `saved`, `experts` and `norms` of `ModelShape`, computed from the widths of the layers.

    The output of a linear layer is saved, and so is its next function's: queries are rotated and yield the output of
    attention, an up projection passes through the activation function. But keys and values are saved once, and so are
    residuals, to which each block's two last matrices add their outputs.
    """
    hidden, layers, width = config.hidden_size, config.num_hidden_layers, attention_head_dim(config)
    queries, keys = width * getattr(config, "num_attention_heads", 0), width * num_kv_heads(config)
    experts_of_token = getattr(config, "num_experts_per_tok", None) or 1
    head = model.get_output_embeddings()
    outputs = experts = norms = 0.0
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D) and module is not head:
            outputs += module.weight.shape[1 if isinstance(module, Conv1D) else 0]
        elif not isinstance(module, nn.Conv1d):  # experts: 2/3 of a gated MLP are up projections
            stacks = [tensor for tensor in module.parameters(recurse=False) if tensor.ndim == 3]
            experts += experts_of_token * sum(2 / 3 * stack[0].numel() / hidden + hidden / 2 for stack in stacks)
        if "norm" in type(module).__name__.lower():
            weight = getattr(module, "weight", None)
            units = hidden if weight is None else weight.numel()
            per_head = units == width != hidden  # one norm for queries, one for keys
            norms += ((queries + keys) / 2 if per_head else units) / (2 if isinstance(module, nn.LayerNorm) else 1)
    saved = 2 * (outputs + experts) - 2 * layers * (hidden + keys)
    if any(isinstance(module, NewGELUActivation | FastGELUActivation) for module in model.modules()):  # in many steps
        saved += 3 * (outputs - layers * (2 * hidden + queries + 2 * keys))
    return {"saved": saved, "experts": experts, "norms": norms}


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def estimate_learner(settings: Settings, models: Sequence[ModelShape]) -> Memory:
    """Estimates the memory of a process that learns: the driver or a learner.

    Args:
        models: from `model_shapes`.
    """
    device = torch.device("cuda" if settings.gpus_per_learner else "cpu")
    size, shards = _bytes(settings, device), settings.shards_per_policy or 1
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
        parts = {base: _base(settings, models[0], device), "adapters": 4.0 * sum(trained)}
    adam = 8.0 * sum(trained) / shards
    parts["gradients"] = 4.0 * max(trained)  # LLMs learn one after another
    parts = {name: part / shards for name, part in parts.items()}
    if settings.offload_optimizer:
        parts["Adam chunk"] = 8.0 * min(offloaded_adam.CHUNK_WEIGHTS, max(trained) / shards)
    else:
        parts["Adam"] = adam
    if shards > 1:
        gathered = models[0].outside + 2 * models[0].block  # the next block is prefetched
        stored = base_dtype(settings.dtype, device).itemsize
        gradients = 4.0 * (models[0].outside + models[0].block)
        parts["unsharded blocks"] = float(stored * gathered) if settings.lora else size * gathered + gradients
    elif size == 2 and (settings.lora is None or device.type == "cpu"):
        parts["bf16 copy"] = 2.0 * max(model.cast for model in models)  # autocast's, of the policy that is learning
    parts["activations"] = max(_activations(settings, model, device) for model in models)
    parts["attention mask"] = max(_tree_mask(settings, model, device) for model in models)
    parts["logits"] = max(_logits(settings, model, device, shards) for model in models)
    memory = _with_overhead(parts, device, LIBRARIES["learner"])
    if device.type == "cpu":
        return memory
    # A checkpoint copies all weights and moments, and one LLM's moments again when it writes them.
    copied = (12.0 * sum(trained) + 8.0 * max(trained)) / shards
    return memory._replace(host=memory.host + copied + (adam if settings.offload_optimizer else 0.0))


def _activations(settings: Settings, model: ModelShape, device: torch.device) -> float:
    """Bytes that the forward pass of the longest micro-batch saves for the backward pass, without logits.

    These are the activations of every block; with `gradient_checkpointing`, the inputs of all blocks and the
    activations of one.
    """
    length, size = settings.max_length, _bytes(settings, device)
    stored = device.type == "cuda" if settings.lora else (settings.shards_per_policy or 1) > 1  # in the compute type
    autocast = size == 2 and not stored
    saved = model.saved + (3 * model.layers * model.hidden + 2 * model.experts if autocast else 0)  # 16-bit copies
    block = (size * saved + (FROZEN_NORM if settings.lora else NORM) * model.norms) / model.layers
    eager = eager_is_faster(torch.bfloat16 if size == 2 else torch.float32, device, length)
    if eager:  # attention scores in fp32, and in bf16 for the product with the values
        longest = longest_pack(eager, length) if model.tree_masks else length
        block += 6.0 * model.queries * min(longest, _rows(settings) * length)
    residual = float(model.hidden * (size if stored else 4))
    layers = model.layers * residual + block if settings.gradient_checkpointing else model.layers * block
    return _rows(settings) * length * layers


def _tree_mask(settings: Settings, model: ModelShape, device: torch.device) -> float:
    """Bytes of the attention mask of prefix trees at its largest, with as many tokens as plain rows have."""
    length, size = settings.max_length, _bytes(settings, device)
    eager = eager_is_faster(torch.bfloat16 if size == 2 else torch.float32, device, length)
    tokens = _rows(settings) * length
    return float(size * model.tree_masks * tokens * min(longest_pack(eager, length), tokens))


def _rows(settings: Settings) -> int:
    """Maximum number of full-length rows in a micro-batch."""
    rows = min(settings.micro_batch_size, -(-settings.responses_per_step // settings.ranks))
    if settings.micro_batch_limit is None:
        return rows
    return min(rows, max(settings.micro_batch_limit // settings.max_length, 1))


def _logits(settings: Settings, model: ModelShape, device: torch.device, shards: int) -> float:
    """Bytes of logits, their gradient, and the larger of a part of them in fp32 and the gradient of the head's weights.

    The latter is added to that of earlier micro-batches.
    """
    rows, size = _rows(settings), _bytes(settings, device)
    positions = rows * (settings.max_response_tokens + 1)
    if model.tree_masks and settings.micro_batch_limit is not None:  # all of these may predict response tokens
        positions = max(positions, min(settings.micro_batch_limit, settings.micro_batch_size * positions // rows))
    count = float(positions * model.vocabulary)
    part = 4.0 * min(count, max(logits.CHUNK_LOGITS[device.type], rows * model.vocabulary))
    head = 0.0 if settings.lora or shards > 1 else (4.0 + 2.0 * (size == 2)) * model.vocabulary * model.hidden
    return 2.0 * size * count + max(part, head)


def estimate_runner(settings: Settings, models: Sequence[ModelShape]) -> Memory:
    """Estimates the memory of a process that generates, with its reward process.

    A reward's own model is unknown here, so it is not counted.

    Args:
        models: from `model_shapes`.
    """
    device = torch.device("cuda" if settings.gpus_per_runner else "cpu")
    size, split = _bytes(settings, device), settings.tensor_parallel_size
    devices = split if device.type == "cuda" else 1
    trained, frozen = models[: len(settings.models)], models[len(settings.models) :]
    engines = models if settings.lora is None else [*trained[:1], *frozen]
    adapters = 4.0 * sum(model.adapter for model in trained)  # upper bound per device
    concurrent = min(settings.chains, 256)
    libraries = LIBRARIES[settings.backend] + LIBRARIES["reward"]
    if settings.num_runners == 0:
        libraries -= LIBRARIES["learner"]  # counted for the driver already
    if settings.backend == "transformers":
        full = models if settings.lora is None else frozen
        base = 0.0 if settings.lora is None else _base(settings, models[0], device)
        parts = {
            "weights": base + 4.0 * sum(model.parameters for model in full),
            "adapters": adapters,
            "KV cache": float(
                concurrent * settings.max_length * max(model.heads * model.head for model in models) * size
            ),
        }
        return _with_overhead(parts, device, libraries)
    blocks = concurrent * -(-settings.max_length // BLOCK_TOKENS) + 16
    parts = {
        "weights": float(size) * sum(model.parameters for model in engines) / devices,
        "adapters": adapters,
        "KV caches": float(blocks * BLOCK_TOKENS * size * sum(max(m.heads // devices, 1) * m.head for m in engines)),
    }
    if split > 1:
        libraries += len(engines) * (split + 1) * LIBRARIES["vllm"]
    return _with_overhead(parts, device, libraries)


def _base(settings: Settings, model: ModelShape, device: torch.device) -> float:
    if settings.quantization != "none":
        return NF4 * model.parameters
    stored = _bytes(settings, device) if device.type == "cuda" else base_dtype(settings.dtype, device).itemsize
    return float(stored * model.parameters)


def _bytes(settings: Settings, device: torch.device) -> int:
    """Bytes per number in the compute type; `auto` counts as bf16 if the GPU is on another machine."""
    if device.type == "cuda" and settings.dtype == "auto" and not torch.cuda.is_available():
        return 2
    return compute_dtype(settings.dtype, device).itemsize


def _with_overhead(parts: dict[str, float], device: torch.device, libraries: float) -> Memory:
    if device.type == "cpu":
        parts["libraries"] = libraries
    parts["allowance"] = ALLOWANCE * sum(parts.values())
    parts = {name: size for name, size in parts.items() if size}
    return Memory(device.type, parts, 0.0 if device.type == "cpu" else libraries)
