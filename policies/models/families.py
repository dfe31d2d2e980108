"""The table of model families: what learners and vLLM make of each, as `python -m benchmarks.families` measured it.

Nothing is loaded to read it.
"""

from __future__ import annotations

import json
from functools import cache
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
    """Reads the committed table."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    return Table(table["versions"], table["families"])


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
