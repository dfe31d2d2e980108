"""What a forward pass keeps for the backward pass, counted by a pass over tensors that have no values.

So every family is counted as it is written, whatever its blocks consist of.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from policies.learning.sharding import blocks_of
from policies.models.adapters import adapted
from policies.models.language_model import eager_is_faster, store_matrices
from policies.models.lora import Lora
from policies.models.model_check import ModelError

RULE = 34
"""Values that a block keeps, per token and hidden unit: Korthikanti et al. 2022, in half precision, in bytes."""


class Kept(NamedTuple):
    """Bytes that a micro-batch's forward pass keeps, without logits."""

    whole: float
    """All of it."""
    inputs: float
    """What goes into the blocks, from which they can be computed again."""
    block: float
    """The most that one block keeps."""


def kept(
    model: PreTrainedModel, rows: int, length: int, computed: torch.dtype, *, lora: Lora | None, cast: bool, plain: bool
) -> Kept:
    """Counts what is kept of rows of so many tokens.

    Args:
        model: on the meta device; it is used up.
        rows, length: the micro-batch.
        computed: the compute type.
        lora: what is trained; None: all weights.
        cast: all of the model is in the compute type; else only what it multiplies with.
        plain: choose the attention of a CPU.

    Returns:
        The bytes. Where what a family computes depends on values (a mixture of experts), those of a rule of thumb.
    """
    if lora is None:
        model.requires_grad_(True)
    else:
        model = adapted(model, lora)
    if cast:
        model.to(computed)
    elif computed == torch.bfloat16:  # else the copies that autocast makes would be counted
        store_matrices(model, computed)
    config = model.eval().config.get_text_config()
    try:
        with _quiet(), FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            if plain and eager_is_faster(computed, torch.device("cpu"), length):
                model.set_attn_implementation("eager")
            return _count(model, rows, length, computed)
    except RuntimeError:  # of many kinds: there are no values to look at
        one = rows * length * config.hidden_size * computed.itemsize / 2.0
        return Kept(RULE * config.num_hidden_layers * one, 2 * config.num_hidden_layers * one, RULE * one)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch from reporting what cannot be computed without values."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


class _FusedAttention(TorchFunctionMode):
    """Gives tensors without values the fused attention that those with values get."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), named: Any = None) -> Any:
        named = named or {}
        if function is not F.scaled_dot_product_attention:
            return function(*args, **named)
        query, key, value, *rest = args
        mask = rest[0] if rest else named.get("attn_mask")
        if mask is not None and mask.dtype == torch.bool:
            mask = mask.to(query.dtype)
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return fused(query, key, value, 0.0, mask is None, attn_mask=mask)[0]


def _count(model: PreTrainedModel, rows: int, length: int, computed: torch.dtype) -> Kept:
    weights = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    found: dict[int, Tensor] = {}
    of_block: list[float] = [0.0]
    inputs: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage()._cdata
        if place not in weights and place not in found:
            found[place] = tensor  # alive, as another would get its place
        return tensor

    def total() -> float:
        return float(sum(tensor.untyped_storage().nbytes() for tensor in found.values()))

    def begin(block: nn.Module, given: Any, named: Any) -> None:
        hidden = given[0] if given else named["hidden_states"]
        inputs.append(hidden.untyped_storage().nbytes())
        of_block.append(-total())

    def end(*_: Any) -> None:
        of_block[-1] += total()

    for block in _blocks(model):
        block.register_forward_pre_hook(begin, with_kwargs=True)
        block.register_forward_hook(end)
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    with (
        saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=computed == torch.bfloat16),
        _FusedAttention(),
    ):
        model(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            position_ids=tokens,
            use_cache=False,
        )
    return Kept(total(), float(sum(inputs)), max(of_block))


def _blocks(model: PreTrainedModel) -> list[nn.Module]:
    try:
        return blocks_of(model)
    except ModelError:  # one that cannot be split
        return []
