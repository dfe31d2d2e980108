"""Whether a model's family can be trained with the settings of a run, found out before anything is started."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import NamedTuple

from policies.compat.transformers import attention_of
from policies.models.adapters import linear_layers, refuse_targets
from policies.models.families import LIMIT, engine_fault, engine_row, installed_version, learner_row
from policies.models.language_model import empty_language_model
from policies.models.lora import Lora
from policies.models.model_check import ModelError, load_config


class Family(NamedTuple):
    """What is known of a model's family."""

    model_type: str
    padding: float | None
    """Nats by which padding changes a row, in a tiny model; None: only the model itself can tell, at start."""
    attention: str
    """The implementation that learners use."""
    lora_layers: tuple[str, ...]
    """Names of the layers that can carry an adapter."""
    engine: str
    """What is known of it in vLLM, in words."""

    def __str__(self) -> str:
        padding = "honours padding" if self.padding is not None else "padding is checked at start"
        return (
            f"{self.model_type}: {padding}; {self.attention} attention; LoRA on {', '.join(self.lora_layers)}; "
            f"{self.engine}"
        )


def check_family(
    path: str, backend: str, device: str = "cpu", lora: Lora | None = None, trust_remote_code: bool = False
) -> Family:
    """Checks a model's family by the table of what its code and vLLM do; of other families the learners tell at start.

    Args:
        path: folder or hub id.
        backend: what generates, `vllm` or `transformers`.
        device: where it does, `cpu` or `cuda`; the table was measured on a CPU, and says nothing of another.
        lora: what adapters are like; None: all weights are trained.
        trust_remote_code: run code that comes with the model.

    Returns:
        What is known of the family.

    Raises:
        ModelError: its rows would be scored wrongly, the engine cannot serve or reload it, or a layer cannot carry an
            adapter; or nothing is loadable there.
    """
    family = _examined(path, trust_remote_code)
    if family.padding is not None and not family.padding < LIMIT:
        raise ModelError(
            f"`{path}` is of the family {family.model_type}, whose code ignores padding or positions: in a batch with "
            f"longer prompts a row gets other log-probabilities (by {family.padding:.2g} nats in a tiny model). Set "
            "model to one of another family."
        )
    if lora is not None:
        if lora.targets:
            refuse_targets(empty_language_model(path, trust_remote_code), lora.targets)
        if backend == "vllm":
            _check_engine_targets(path, family.model_type, lora)
    if backend == "vllm" and device == "cpu" and _is_measured(path, family.model_type, trust_remote_code):
        fault, fault_of_full = (engine_fault(family.model_type, adapters) for adapters in (lora is not None, False))
        if fault is not None:
            other = "weights=full or " if fault_of_full is None else ""
            raise ModelError(
                f"`{path}` is of the family {family.model_type}: vLLM {installed_version('vllm')} {fault}. "
                f"Set {other}backend=transformers."
            )
    return family


@lru_cache(maxsize=16)
def _examined(path: str, trust_remote_code: bool) -> Family:
    model = empty_language_model(path, trust_remote_code)
    kind = load_config(path, trust_remote_code).model_type
    taken = inspect.signature(model.forward).parameters.values()
    if not any(each.name == "position_ids" or each.kind is each.VAR_KEYWORD for each in taken):
        raise ModelError(
            f"`{path}` is of the family {kind}, whose code takes no position_ids: padded prompts would get other "
            "positions than alone. Set model to one of another family."
        )
    padding = learner_row(kind).get("padding")
    return Family(kind, padding, attention_of(model), tuple(linear_layers(model)), _engine_words(kind))


def _is_measured(path: str, model_type: str, trust_remote_code: bool) -> bool:
    """Whether vLLM takes a model for what the table has: it goes by the class that a checkpoint names."""
    named = load_config(path, trust_remote_code).architectures or []
    return not named or learner_row(model_type).get("class") in named


def _check_engine_targets(path: str, model_type: str, lora: Lora) -> None:
    barred = engine_row(model_type).get("lora_barred", {})
    for target in lora.targets:
        if target in barred:
            raise ModelError(
                f"vLLM {installed_version('vllm')} cannot adapt the layers {target!r} of `{path}` (family "
                f"{model_type}): {barred[target]}. Leave {target} out of lora_targets, or set backend=transformers."
            )


def _engine_words(model_type: str) -> str:
    version = installed_version("vllm")
    if version is None:
        return "vLLM is not installed"
    if not engine_row(model_type):
        return f"vLLM {version} was not tried with it, so the weight-sync check decides at start"
    faults = [fault for lora in (False, True) if (fault := engine_fault(model_type, lora))]
    return f"vLLM {version} {' and '.join(faults) or 'serves it, reloads it, and adapts it'}"
