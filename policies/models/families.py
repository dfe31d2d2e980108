"""What a model's family can do: whether its code honours padding, which attention it needs, what LoRA and vLLM can do.

The family's own code is asked, by a tiny random model made from the model's configuration. What vLLM can serve and
reload stands in a table, `families.json`, made by `python -m benchmarks.families`.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from policies.models.tiny import VOCABULARY, CannotShrink, tiny_model

TABLE = Path(__file__).with_name("families.json")
LIMIT = 1e-3
"""Nats by which a token's log-probability may differ in fp32; rounding makes some 1e-5."""
ENGINE_LIMIT = 1e-2
"""The same between vLLM and transformers, whose kernels differ; what was found wrong was off by 0.4 and more."""
_LENGTHS = ((3, 9), (14, 4), (24, 6))
"""Prompts and responses of the rows that are compared, in tokens; some are longer than a tiny model's window."""


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
    return read_table().families.get(model_type, {}) if _is_measured("transformers") else {}


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


def needed_attention(config: PreTrainedConfig, trust_remote_code: bool = False) -> str | None:
    """Returns the attention implementation that a model's definition needs; None: any that transformers offers.

    PyTorch's fused attention silently leaves out a soft cap on the scores, for example; the eager implementation has
    it. A family that is not in the table is asked by a tiny model with both.
    """
    if has_soft_cap(config):
        return "eager"
    row = learner_row(config.model_type)
    difference = (
        row["attention_difference"] if row else _difference_of(config.to_json_string(), config, trust_remote_code)
    )
    return "eager" if difference is not None and not difference < LIMIT else None


def has_soft_cap(config: PreTrainedConfig) -> bool:
    """Tells whether a model caps its attention scores."""
    values = config.get_text_config().to_dict()
    return any(value and "att" in name and "cap" in name for name, value in values.items())


_differences: dict[str, float | None] = {}


def _difference_of(key: str, config: PreTrainedConfig, trust_remote_code: bool) -> float | None:
    """What `attention_difference` returns, once per configuration; None where a small model cannot tell."""
    if key not in _differences:
        try:
            _differences[key] = attention_difference(config, trust_remote_code)
        except CannotShrink:
            _differences[key] = None  # decided by `PolicyModel.check_forward`, on the model itself
    return _differences[key]


def padding_difference(model: PreTrainedModel) -> float:
    """Returns by how much rows of one batch, padded, differ from each row alone: the largest difference, in nats."""
    rows = _rows()
    alone = [_logprobs(model, [row])[0] for row in rows]
    return _largest(alone, _logprobs(model, rows))


def attention_difference(config: PreTrainedConfig, trust_remote_code: bool = False) -> float | None:
    """Returns by how much the attention that transformers chooses for a family differs from eager; None: it is eager.

    Raises:
        CannotShrink: the family's code does not take a small configuration.
    """
    chosen = tiny_model(config, trust_remote_code=trust_remote_code)
    if chosen.config._attn_implementation == "eager":
        return None
    eager = tiny_model(config, trust_remote_code=trust_remote_code, attention="eager")
    return _largest(_logprobs(chosen, _rows()), _logprobs(eager, _rows()))


@cache
def _rows() -> list[tuple[list[int], list[int]]]:
    """Prompts and responses."""
    random = torch.Generator().manual_seed(0)

    def tokens(length: int) -> list[int]:
        return torch.randint(1, VOCABULARY, (length,), generator=random).tolist()

    return [(tokens(prompt), tokens(response)) for prompt, response in _LENGTHS]


@torch.no_grad()
def _logprobs(model: PreTrainedModel, rows: list[tuple[list[int], list[int]]]) -> list[Tensor]:
    """Log-probabilities of the responses' tokens; prompts are padded on the left, responses on the right."""
    width = max(len(prompt) for prompt, _ in rows)
    tokens = torch.zeros(len(rows), width + max(len(response) for _, response in rows), dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for index, (prompt, response) in enumerate(rows):
        own = slice(width - len(prompt), width + len(response))
        tokens[index, own], mask[index, own] = torch.tensor(prompt + response), 1
    logits = model(
        input_ids=tokens,
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        use_cache=False,
    ).logits
    logprobs = torch.log_softmax(logits.float(), -1)
    return [
        logprobs[index, width - 1 : width - 1 + len(response)].gather(1, torch.tensor(response)[:, None]).squeeze(1)
        for index, (_, response) in enumerate(rows)
    ]


def _largest(some: list[Tensor], others: list[Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(some, others, strict=True))
