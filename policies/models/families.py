"""The table of model families: what learners and vLLM make of each, as `python -m benchmarks.families` measured it.

Nothing is loaded to read it.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TABLE = Path(__file__).with_name("families.json")
LIMIT = 1e-3
"""Nats by which a token's log-probability may differ in fp32; rounding makes some 1e-5."""
ENGINE_LIMIT = 1e-2
"""The same between vLLM and transformers, whose kernels differ; what was found wrong was off by 0.4 and more."""


class Table(NamedTuple):
    """What the sweep measured."""

    versions: dict[str, str]
    """Of the packages that it ran with."""
    families: dict[str, dict[str, Any]]
    """Rows by `model_type`; `benchmarks/families.py` says what is in one."""


@cache
def read_table() -> Table:
    """Reads the committed table; without a file it is empty, as before the first sweep."""
    if not TABLE.is_file():
        return Table({}, {})
    held = json.loads(TABLE.read_text(encoding="utf-8"))
    return Table(held["versions"], held["families"])


def learner_row(model_type: str) -> dict[str, Any]:
    """What was measured of a family's code in the installed version of transformers; empty: nothing."""
    row = read_table().families.get(model_type, {}) if _is_measured("transformers") else {}
    return {} if "error" in row else row


def needed_attention(config: PreTrainedConfig) -> str | None:
    """Returns the attention implementation that a model's definition needs; None: any that transformers offers.

    PyTorch's fused attention silently leaves out a soft cap on the scores, for example; the eager implementation has
    it. Of a family that is not in the table `PolicyModel.check_forward` tells, on the model itself.
    """
    difference = read_table().families.get(config.model_type, {}).get("attention_difference")
    return "eager" if has_soft_cap(config) or (difference is not None and not difference < LIMIT) else None


def has_soft_cap(config: PreTrainedConfig) -> bool:
    """Tells whether a model caps its attention scores."""
    values = config.get_text_config().to_dict()
    return any(value and "att" in name and "cap" in name for name, value in values.items())


def engine_row(model_type: str) -> dict[str, Any]:
    """What was measured of a family in the installed version of vLLM; empty: nothing."""
    found: dict[str, Any] = read_table().families.get(model_type, {}).get("vllm", {}) if _is_measured("vllm") else {}
    return found


@cache
def _is_measured(package: str) -> bool:
    return read_table().versions.get(package) == installed_version(package)


def installed_version(package: str) -> str | None:
    """A package's version, without the name of its build; vLLM's build for CPUs is a package of another name."""
    for name in (package, f"{package}-cpu"):
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None


def engine_fault(model_type: str, lora: bool) -> str | None:
    """Returns what the installed vLLM does wrong with a family, as the end of a sentence; None: nothing is known.

    Args:
        model_type: the family.
        lora: serve adapters, instead of loading all weights.
    """
    row = engine_row(model_type)
    if not row:
        return None
    if "model" not in row:
        return f"cannot serve this family: {row['error']}"
    prefix = "lora_" if lora else ""
    if error := row.get(f"{prefix}error"):
        return f"cannot {'adapt' if lora else 'reload'} this family: {error}"
    before, after = row[f"{prefix}before"], row[f"{prefix}after"]
    if before > ENGINE_LIMIT:
        return f"gives other log-probabilities than transformers for this family, by up to {before:.2g} nats"
    if names := row.get(f"{prefix}not_loaded"):
        return f"leaves {len(names)} weights of this family as they were when it is given new ones, such as {names[0]}"
    if after > ENGINE_LIMIT:
        return f"does not use this family's new weights: log-probabilities are off by up to {after:.2g} nats"
    return None
