"""Uses of private interfaces of transformers (5) and PEFT (0.21)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def attn_implementation(model: PreTrainedModel) -> str:
    """Returns a model's attention implementation. The public interface can set it, but not read it."""
    implementation: str = model.config._attn_implementation
    return implementation


def can_switch_attention(model: PreTrainedModel) -> bool:
    """Whether `set_attn_implementation` has an effect; some families (Falcon) choose attention when they are built."""
    return model._can_set_attn_implementation()


def no_split_classes(model: PreTrainedModel) -> set[str]:
    """Returns the names of the module classes that must not be split over devices."""
    return set(model._no_split_modules or ())


def ignored_weights(model: PreTrainedModel) -> tuple[str, ...]:
    """Returns patterns of weights that a family's checkpoints may contain although its models do not have them."""
    return tuple(model._keys_to_ignore_on_load_unexpected or ())


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Disables the adapters of a PEFT model.

    PEFT's own switch would also clear the adapters' `requires_grad`.
    """
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
