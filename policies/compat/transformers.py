"""transformers (5) and PEFT (0.21) beside their public interfaces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def attention_of(model: PreTrainedModel) -> str:
    """Returns the implementation of attention that a model computes with: it can be set publicly, but not read."""
    implementation: str = model.config._attn_implementation
    return implementation


def block_classes(model: PreTrainedModel) -> set[str]:
    """Returns the names of the classes whose modules are not to be split over devices; nothing public tells them."""
    return set(model._no_split_modules or ())


def ignored_weights(model: PreTrainedModel) -> tuple[str, ...]:
    """Returns patterns of weights that checkpoints of a family may hold and its models do not."""
    return tuple(model._keys_to_ignore_on_load_unexpected or ())


def unsaved_weights(model: PreTrainedModel) -> frozenset[str]:
    """Returns the names of weights that `save_pretrained` leaves out, such as those that are tied to others."""
    return frozenset(model._keys_to_ignore_on_save or ())


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Lets the layers of an adapted model compute as their base does.

    PEFT's own switch would take `requires_grad` from the adapters.
    """
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
