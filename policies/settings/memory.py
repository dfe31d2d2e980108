"""An estimate of the memory that each process of a run needs, by formulas from the model's shape and the settings.

Weights, gradients, optimizer, reference, activations, logits and KV caches are counted; libraries and an allowance on
top of all are what was measured (docs/plan.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import FastGELUActivation, NewGELUActivation
from transformers.pytorch_utils import Conv1D

from policies.generation.vllm_generator import BLOCK_TOKENS
from policies.learning import logits, offloaded_adam
from policies.learning.sharding import blocks_of
from policies.models.adapters import linear_layers
from policies.models.language_model import base_dtype, compute_dtype, eager_is_faster, meta_model
from policies.models.model_check import ModelError, check_split, head_width, key_value_heads
from policies.settings.settings import Settings

LIBRARIES = {"learner": 0.4e9, "vllm": 0.7e9, "transformers": 0.4e9, "reward": 0.3e9}
"""Bytes of a process before it holds a model, as measured (benchmarks/README.md)."""
NF4 = 0.5
"""Bytes of a weight in 4 bits."""
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of devices that a model may be split over."""
ALLOWANCE = 0.25
"""For what is not counted: buffers, copies on their way, fragments of the heap."""
NORM, FROZEN_NORM = 8.0, 4.0
"""Bytes that a norm keeps for its backward pass per token and unit, beside what it writes."""


class Shape(NamedTuple):
    """A model's sizes."""

    parameters: int
    block: int
    """Of its largest block of layers."""
    outside: int
    """Of what is in no block: embeddings, head."""
    cast: int
    """Of linear layers, which autocast casts; without a head that is the embedding too."""
    adapter: int
    """Of one policy's adapter; 0 without."""
    kept: float
    """Values that all blocks keep for their backward pass, per token, beside those of norms."""
    experts: float
    """Of these, half of what experts keep that are in one tensor, which autocast leaves in fp32."""
    norms: float
    """Units of all norms; of a `LayerNorm`, which is one kernel, half of them."""
    layers: int
    hidden: int
    vocabulary: int
    queries: int
    """Heads of queries."""
    heads: int
    """Of keys and values."""
    head: int
    """Keys and values of one token and head, over all layers."""


class Memory(NamedTuple):
    """Bytes that one process needs, by what they are for."""

    device: str
    """`cpu` or `cuda`: where models are."""
    parts: dict[str, float]
    """On that device; where an engine is split over several, on each."""
    host: float
    """Beside it in the machine's memory."""

    @property
    def total(self) -> float:
        """On the device."""
        return sum(self.parts.values())


def shapes(settings: Settings) -> list[Shape]:
    """Reads the sizes of each LLM's model, without its weights.

    Raises:
        ModelError: there is no such model, or `tensor_parallel_size` cannot split it.
    """
    paths = list(settings.model_paths.values())
    found = {path: _shape(path, settings) for path in dict.fromkeys(paths)}
    return [found[path] for path in paths]


def _shape(path: str, settings: Settings) -> Shape:
    model = meta_model(path, settings.trust_remote_code)
    config = model.config.get_text_config()
    check_split(config, settings.tensor_parallel_size)
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear | Conv1D)}
    adapter = 0
    if settings.lora is not None:
        targets, head = settings.lora.targets or linear_layers(model), model.get_output_embeddings()
        adapted = [layer for name, layer in linear.items() if name.rpartition(".")[2] in targets and layer is not head]
        adapter = settings.lora.rank * sum(sum(layer.weight.shape) for layer in adapted)
    parameters = _count(model)
    tied = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)}
    blocks = [_count(block) for block in blocks_of(model)] if (settings.shards_per_policy or 1) > 1 else [0]
    return Shape(
        parameters=parameters,
        block=max(blocks),
        outside=parameters - sum(blocks),
        cast=sum(_count(layer) for layer in linear.values() if id(layer.weight) not in tied),
        adapter=adapter,
        **_kept(model, config),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        queries=getattr(config, "num_attention_heads", 0),
        heads=key_value_heads(config),
        head=2 * config.num_hidden_layers * head_width(config),
    )


def _kept(model: PreTrainedModel, config: PreTrainedConfig) -> dict[str, Any]:
    """Returns what blocks keep per token, by the widths of their layers, as `Shape` has it.

    What a linear layer writes is kept, and once more what is made of it: queries are rotated and give the attention's
    output, a matrix up goes through the activation function. But keys and values are kept once, and so are residuals:
    what each block's two last matrices write is added to them.
    """
    hidden, layers, width = config.hidden_size, config.num_hidden_layers, head_width(config)
    queries, keys = width * getattr(config, "num_attention_heads", 0), width * key_value_heads(config)
    experts_of_token = getattr(config, "num_experts_per_tok", None) or 1
    head = model.get_output_embeddings()
    written = experts = norms = 0.0
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D) and module is not head:
            written += module.weight.shape[1 if isinstance(module, Conv1D) else 0]
        elif not isinstance(module, nn.Conv1d):  # experts: of a gated MLP, 2/3 are matrices up
            stacks = [tensor for tensor in module.parameters(recurse=False) if tensor.ndim == 3]
            experts += experts_of_token * sum(2 / 3 * stack[0].numel() / hidden + hidden / 2 for stack in stacks)
        if "norm" in type(module).__name__.lower():
            weight = getattr(module, "weight", None)
            units = hidden if weight is None else weight.numel()
            of_heads = units == width != hidden  # one norm for queries, one for keys
            norms += ((queries + keys) / 2 if of_heads else units) / (2 if isinstance(module, nn.LayerNorm) else 1)
    kept = 2 * (written + experts) - 2 * layers * (hidden + keys)
    if any(isinstance(module, NewGELUActivation | FastGELUActivation) for module in model.modules()):  # in many steps
        kept += 3 * (written - layers * (2 * hidden + queries + 2 * keys))
    return {"kept": kept, "experts": experts, "norms": norms}


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def learner(settings: Settings, models: Sequence[Shape]) -> Memory:
    """Estimates a process that learns: the driver, or a learner. Takes what `shapes` gives."""
    device = torch.device("cuda" if settings.gpus_per_learner else "cpu")
    size, shards = _bytes(settings, device), settings.shards_per_policy or 1
    names = list(settings.models.values())
    if settings.shards_per_policy is not None:  # each learner has one LLM, or a part of it
        models, names = [max(models, key=lambda model: model.parameters)], names[:1]
    if settings.lora is None:
        trained = [model.parameters for model in models]
        references = dict(zip(names, models, strict=True)).values()
        of_reference = float(size) if device.type == "cuda" or shards > 1 else 4.0
        parts = {
            "weights": 4.0 * sum(trained),
            "reference": of_reference * sum(model.parameters for model in references),
        }
    else:
        trained = [model.adapter for model in models]
        parts = {"base and reference": _base(settings, models[0], device), "adapters": 4.0 * sum(trained)}
    adam = 8.0 * sum(trained) / shards
    parts["gradients"] = 4.0 * max(trained)  # LLMs learn one after another
    parts = {name: part / shards for name, part in parts.items()}
    if settings.offload_optimizer:
        parts["Adam at once"] = 8.0 * min(offloaded_adam.AT_ONCE, max(trained) / shards)
    else:
        parts["Adam"] = adam
    if shards > 1:
        gathered = models[0].outside + 2 * models[0].block  # with the next one, which is on its way
        stored = base_dtype(settings.dtype, device).itemsize
        gradients = 4.0 * (models[0].outside + models[0].block)
        parts["whole at once"] = float(stored * gathered) if settings.lora else size * gathered + gradients
    elif size == 2 and (settings.lora is None or device.type == "cpu"):
        parts["bf16 copy"] = 2.0 * max(model.cast for model in models)  # autocast's, of the policy in work
    parts["activations"] = max(_activations(settings, model, device) for model in models)
    parts["logits"] = max(_logits(settings, model, size, shards) for model in models)
    need = _placed(parts, device, LIBRARIES["learner"])
    if device.type == "cpu":
        return need
    # A checkpoint copies all weights and moments, and one LLM's moments once more when it writes them.
    copied = (12.0 * sum(trained) + 8.0 * max(trained)) / shards
    return need._replace(host=need.host + copied + (adam if settings.offload_optimizer else 0.0))


def _activations(settings: Settings, model: Shape, device: torch.device) -> float:
    """What the forward pass of the longest micro-batch keeps for the backward pass, without logits: of every block; or,
    with `gradient_checkpointing`, what goes into the blocks and what one keeps.
    """
    length, size = settings.max_prompt_tokens + settings.max_response_tokens, _bytes(settings, device)
    stored = device.type == "cuda" if settings.lora else (settings.shards_per_policy or 1) > 1  # in the compute type
    autocast = size == 2 and not stored
    kept = model.kept + (3 * model.layers * model.hidden + 2 * model.experts if autocast else 0)  # copies in 16 bits
    block = (size * kept + (FROZEN_NORM if settings.lora else NORM) * model.norms) / model.layers
    if eager_is_faster(torch.bfloat16 if size == 2 else torch.float32, device, length):
        block += 6.0 * model.queries * length  # scores in fp32, and in bf16 for the product with the values
    residual = float(model.hidden * (size if stored else 4))
    layers = model.layers * residual + block if settings.gradient_checkpointing else model.layers * block
    return _rows(settings) * length * layers


def _rows(settings: Settings) -> int:
    """The longest rows that are forwarded at once."""
    rows = min(settings.micro_batch_size, -(-settings.minibatch_size // settings.ranks))
    if settings.micro_batch_tokens is None:
        return rows
    return min(rows, max(settings.micro_batch_tokens // (settings.max_prompt_tokens + settings.max_response_tokens), 1))


def _logits(settings: Settings, model: Shape, size: int, shards: int) -> float:
    """Logits, their gradient, and what is next: a part of them in fp32, or the gradient of the head's weights, which is
    added to that of earlier micro-batches.
    """
    rows = _rows(settings)
    count = float(rows * (settings.max_response_tokens + 1) * model.vocabulary)
    part = 4.0 * min(count, max(logits.AT_ONCE, rows * model.vocabulary))
    head = 0.0 if settings.lora or shards > 1 else (4.0 + 2.0 * (size == 2)) * model.vocabulary * model.hidden
    return 2.0 * size * count + max(part, head)


def runner(settings: Settings, models: Sequence[Shape]) -> Memory:
    """Estimates a process that generates, with its reward process (whose own model is not known here). Takes what
    `shapes` gives.
    """
    device = torch.device("cuda" if settings.gpus_per_runner else "cpu")
    size, split = _bytes(settings, device), settings.tensor_parallel_size
    devices = split if device.type == "cuda" else 1
    engines = models if settings.lora is None else models[:1]
    adapters = 4.0 * sum(model.adapter for model in models)  # on each device, at most
    at_once = min(settings.chains, 256)
    context = settings.max_prompt_tokens + settings.max_response_tokens
    libraries = LIBRARIES[settings.backend] + LIBRARIES["reward"]
    if settings.num_runners == 0:
        libraries -= LIBRARIES["learner"]  # which the driver has already
    if settings.backend == "transformers":
        held = 4.0 * sum(model.parameters for model in models)
        parts = {
            "weights": held if settings.lora is None else _base(settings, models[0], device),
            "adapters": adapters,
            "KV cache": float(at_once * context * max(model.heads * model.head for model in models) * size),
        }
        return _placed(parts, device, libraries)
    blocks = at_once * -(-context // BLOCK_TOKENS) + 16
    parts = {
        "weights": float(size) * sum(model.parameters for model in engines) / devices,
        "adapters": adapters,
        "KV caches": float(blocks * BLOCK_TOKENS * size * sum(max(m.heads // devices, 1) * m.head for m in engines)),
    }
    if split > 1:
        libraries += len(engines) * (split + 1) * LIBRARIES["vllm"]
    return _placed(parts, device, libraries)


def least_shards(settings: Settings, room: float) -> int | None:
    """Returns the fewest learners, each with a GPU of so many bytes, that an LLM fits on; None: more than 128."""
    models = shapes(settings.model_copy(update={"shards_per_policy": 2}))  # with the sizes of blocks
    for shards in SPLITS:
        learners = {
            "shards_per_policy": shards,
            "num_learners": shards * len(settings.policy_ids),
            "gpus_per_learner": 1,
        }
        if learner(settings.model_copy(update=learners), models).total <= room:
            return shards
    return None


def least_parts(settings: Settings, room: float) -> int | None:
    """Returns the fewest GPUs of so many bytes over which a runner's engines fit, up to 8; None: they do not."""
    for parts in (1, 2, 4, 8):
        split = settings.model_copy(update={"tensor_parallel_size": parts, "gpus_per_runner": parts})
        with contextlib.suppress(ModelError):  # its heads cannot be dealt to so many
            if runner(split, shapes(split)).total <= room:
                return parts
    return None


def _base(settings: Settings, model: Shape, device: torch.device) -> float:
    if settings.quantization != "none":
        return NF4 * model.parameters
    return float(base_dtype(settings.dtype, device).itemsize * model.parameters)


def _bytes(settings: Settings, device: torch.device) -> int:
    """Bytes of a number in the compute type; `auto` on a GPU that is not here counts as bf16."""
    if device.type == "cuda" and settings.dtype == "auto" and not torch.cuda.is_available():
        return 2
    return compute_dtype(settings.dtype, device).itemsize


def _placed(parts: dict[str, float], device: torch.device, libraries: float) -> Memory:
    if device.type == "cpu":
        parts["libraries"] = libraries
    parts["allowance"] = ALLOWANCE * sum(parts.values())
    parts = {name: size for name, size in parts.items() if size}
    return Memory(device.type, parts, 0.0 if device.type == "cpu" else libraries)
