"""A model's weights as its files hold them, read a few rows at a time, so that no process needs all of one."""

from __future__ import annotations

import json
import re
from pathlib import Path

from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from policies.compat.transformers import ignored_weights


class StoredWeights:
    """The safetensors files of a model."""

    def __init__(self, path: str) -> None:
        """Finds them, and downloads those of a hub id; there may be none.

        Args:
            path: folder or hub id.
        """
        self._files: dict[str, str] = {}
        """By the names in the files."""
        if index := cached_file(path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False):
            files, _ = get_checkpoint_shard_files(path, index)
            of_name = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
            by_file = {Path(file).name: file for file in files}
            self._files = {name: by_file[file] for name, file in of_name.items()}
        elif file := cached_file(path, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False):
            with safe_open(file, framework="pt") as opened:
                self._files = dict.fromkeys(opened.keys(), file)

    def names(self, model: PreTrainedModel) -> dict[str, str] | None:
        """The names in the files, by those of a model's parameters and persistent buffers, but for adapters.

        None where the files lack a name, have another shape, or hold what has no place in the model, as of families
        that transformers converts when it loads them, and of quantized weights.
        """
        prefix = f"{model.base_model_prefix}."
        wanted = {**dict(model.named_parameters()), **persistent_buffers(model)}
        found = {}
        for name, tensor in wanted.items():
            if ".lora_" in name:
                continue
            known = name.replace(".base_layer.", ".")
            stored = next((each for each in (known, known.removeprefix(prefix)) if each in self._files), None)
            if stored is None or self._shape(stored) != tuple(tensor.shape):
                return None
            found[name] = stored
        aliases = {name.replace(".base_layer.", ".") for name in model.state_dict()}  # tied weights by all their names
        places = {*found.values(), *aliases, *(alias.removeprefix(prefix) for alias in aliases)}
        ignored = (*ignored_weights(model), "rotary_emb.inv_freq")
        if any(not any(re.search(each, name) for each in ignored) for name in self._files.keys() - places):
            return None
        return found

    def rows(self, name: str, start: int, end: int) -> Tensor:
        """Reads the rows `start` to `end` of a tensor, by its name in the files."""
        with safe_open(self._files[name], framework="pt") as file:
            return file.get_slice(name)[start:end]

    def read(self, name: str) -> Tensor:
        """Reads a tensor, by its name in the files."""
        with safe_open(self._files[name], framework="pt") as file:
            return file.get_tensor(name)

    def _shape(self, name: str) -> tuple[int, ...]:
        with safe_open(self._files[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())


def persistent_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """The buffers that are stored with a model's weights, by name."""
    stored = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}
