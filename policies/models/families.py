"""The table of model families: how well learners and vLLM support each, measured by `python -m benchmarks.families`.

Reading it loads no library.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TABLE_PATH = Path(__file__).with_name("families.json")
LOGPROB_TOLERANCE = 1e-3  # tolerance of a token's log-probability in fp32, in nats; rounding causes about 1e-5
ENGINE_LOGPROB_TOLERANCE = 1e-2
"""The same between vLLM and transformers, whose kernels differ; real errors were 0.4 and more."""


class FamilyTable(NamedTuple):
    """The measured table."""

    versions: dict[str, str]  # package versions of the measurement
    families: dict[str, dict[str, Any]]  # rows by `model_type`; `benchmarks/families.py` documents their fields


@cache
def read_family_table() -> FamilyTable:
    """Reads the committed table."""
    table = json.loads(TABLE_PATH.read_text(encoding="utf-8"))
    return FamilyTable(table["versions"], table["families"])


def needed_attention(config: PreTrainedConfig) -> str | None:
    """Returns the attention implementation that a model requires; None: any of transformers'.

    PyTorch's fused attention, for example, silently omits a soft cap on the scores, so such models require eager
    attention. Families that are not in the table are checked by `PolicyModel.check_forward`.
    """
    difference = read_family_table().families.get(config.model_type, {}).get("attention_difference")
    return "eager" if has_soft_cap(config) or (difference is not None and not difference < LOGPROB_TOLERANCE) else None


def has_soft_cap(config: PreTrainedConfig) -> bool:
    """Whether a model soft-caps its attention scores."""
    values = config.get_text_config().to_dict()
    return any(value and "att" in name and "cap" in name for name, value in values.items())


def fix_rope_factors(config: PreTrainedConfig, max_length: int | None) -> bool:
    """Makes a model with longrope (Phi-3.5, Phi-4-mini) rotate rows of all lengths by the same factors.

    transformers rotates all rows of a batch by the long factors if one row is longer than the original context, else by
    the short ones, so a row's log-probabilities would depend on its batch. As in vLLM, the maximal length decides.

    Args:
        max_length: maximal number of tokens of a row; None: unknown, at most the original context.

    Returns:
        Whether the long factors are used.
    """
    config = config.get_text_config()
    values = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    uses_long = False
    for rope in (values, *(part for part in values.values() if isinstance(part, dict))):  # for all layers, or by type
        if not rope.get("long_factor"):
            continue
        default = getattr(config, "original_max_position_embeddings", config.max_position_embeddings)
        if (max_length or 0) > rope.get("original_max_position_embeddings", default):
            uses_long = True
            rope |= {"short_" + name.removeprefix("long_"): rope[name] for name in rope if name.startswith("long_")}
    return uses_long


def supports_prefix_trees(config: PreTrainedConfig, max_length: int | None) -> bool:
    """Whether a model computes the same for rows in a prefix tree, by its configuration and the table.

    `PolicyModel.check_forward` also tries it, but with rows of 16 tokens, which are within most windows.

    Args:
        max_length: maximum number of tokens of a row; None: unknown.
    """
    difference = read_family_table().families.get(config.model_type, {}).get("prefix_tree", 0.0)
    if difference is None or not difference < LOGPROB_TOLERANCE:
        return False
    if max_length is not None and max_length < 16:
        return False
    config = config.get_text_config()
    if layer_types := getattr(config, "layer_types", None):
        return set(layer_types) <= {"full_attention", "sliding_attention"}
    windows = {name: value for name, value in config.to_dict().items() if "window" in name and type(value) is int}
    windows.pop("max_window_layers", None)  # without `sliding_window` it has no effect
    # Some families ignore their `sliding_window`, and other windows count positions in the sequence, not depths.
    return all(name == "sliding_window" and max_length is not None and max_length <= windows[name] for name in windows)
