"""A model's weights as `save_pretrained` writes them, but one tensor after another.

`save_pretrained` needs all that goes into a file at once, and a file may have 50 GB. Files are the same to the byte.
Where a family's stored tensors are parts of the model's, several files may divide them among each other otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

Tensors = Callable[[str], Tensor]
"""Gives a tensor by its name."""
MAX_SHARD_SIZE = "50GB"
"""Of a file, by default: as `save_pretrained` has it."""
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Types as safetensors files name them."""


def write_weights(model: PreTrainedModel, tensors: Tensors, folder: Path, max_shard_size: str = MAX_SHARD_SIZE) -> None:
    """Writes a model's weights into a folder: one file, or several with an index.

    Args:
        model: on the meta device: names, shapes, types, what is tied, and how its family is stored.
        tensors: its weights and persistent buffers, by their names in the model.
        folder: that exists.
        max_shard_size: of a file that holds more than one tensor.

    Raises:
        OSError: the folder cannot be written.
    """
    state = {name: own for name, own in model.state_dict().items() if name not in (model._keys_to_ignore_on_save or ())}
    state = remove_tied_weights_from_state_dict(state, model)
    # Parts of one tensor count as much as it does, unless each is one of its own.
    planned = {name: torch.empty_like(part) for name, part in revert_weight_conversion(model, state).items()}
    split = split_torch_state_dict_into_shards(planned, max_shard_size=max_shard_size)
    stored = _Stored(model, state, planned, tensors)
    for file, names in split.filename_to_tensors.items():
        write_tensors({name: planned[name] for name in names}, stored, folder / file)
    if split.is_sharded:
        metadata = {"total_parameters": model.num_parameters(), **split.metadata}
        index = json.dumps({"metadata": metadata, "weight_map": split.tensor_to_filename}, indent=2, sort_keys=True)
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(f"{index}\n", encoding="utf-8")


def write_tensors(like: Mapping[str, Tensor], tensors: Tensors, file: Path) -> None:
    """Writes a safetensors file.

    Args:
        like: by name, tensors of the shapes and types, which may be on the meta device.
        tensors: them, on the CPU.
        file: that is made.

    Raises:
        OSError: it cannot be written.
    """
    names = sorted(like, key=lambda name: (-like[name].dtype.itemsize, name))  # so that all are aligned
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        start, end = end, end + like[name].nbytes
        shape = list(like[name].shape)
        header[name] = {"dtype": _CODES[like[name].dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            tensor = tensors(name).to(like[name].dtype)
            stream.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


class _Stored:
    """A model's tensors by the names that files have, which some families convert when they are loaded."""

    def __init__(
        self, model: PreTrainedModel, state: Mapping[str, Tensor], planned: Mapping[str, Tensor], tensors: Tensors
    ) -> None:
        """Finds what has to be converted at once: each tensor alone, those of a layer, or all of them."""
        self._model = model
        self._tensors = tensors
        self._made: dict[str, Tensor] = {}
        for key in (str, _layer, lambda _: ""):
            self._sources = {
                made: (group, tensor.shape)
                for group in _grouped(state, key)
                for made, tensor in self._converted({name: state[name] for name in group}).items()
            }
            if {name: shape for name, (_, shape) in self._sources.items()} == {n: x.shape for n, x in planned.items()}:
                break

    def __call__(self, name: str) -> Tensor:
        if name not in self._made:
            group, _ = self._sources[name]
            self._made |= self._converted({source: self._tensors(source) for source in group})
        return self._made.pop(name)

    def _converted(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        converted: dict[str, Tensor] = revert_weight_conversion(self._model, tensors)
        return converted


def _layer(name: str) -> str:
    """The name of the layer that a tensor is in; of one that is in none its own."""
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found else name


def _grouped(names: Iterable[str], key: Callable[[str], str]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(key(name), []).append(name)
    return list(groups.values())
