"""A model's weights in its safetensors files, read a few rows at a time, so that no process needs the whole model."""

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
from policies.models.revision import split_revision


class StoredWeights:
    """The safetensors files of a model."""

    def __init__(self, path: str) -> None:
        """Locates the files, and downloads those of a hub id; there may be none.

        Args:
            path: from `policies.models.model_names.model_path`.
        """
        path, revision = split_revision(path)
        self._files: dict[str, str] = {}  # path of the file of each tensor, by its name in the files
        if index := cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **revision, _raise_exceptions_for_missing_entries=False):
            files, _ = get_checkpoint_shard_files(path, index, **revision)
            weight_map = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
            paths = {Path(file).name: file for file in files}
            self._files = {name: paths[file] for name, file in weight_map.items()}
        elif single_file := cached_file(
            path, SAFE_WEIGHTS_NAME, **revision, _raise_exceptions_for_missing_entries=False
        ):
            with safe_open(single_file, framework="pt") as file:
                self._files = dict.fromkeys(file.keys(), single_file)

    def names(self, model: PreTrainedModel) -> dict[str, str] | None:
        """Maps names of a model's parameters and persistent buffers, without adapters, to names in the files.

        Returns:
            The mapping; None if the files lack a tensor, have another shape, or contain tensors that the model does not
            have, as with quantized weights and with families whose weights transformers converts on loading.
        """
        prefix = f"{model.base_model_prefix}."
        names = {}
        for name, tensor in stored_tensors(model).items():
            if ".lora_" in name:
                continue
            base_name = name.replace(".base_layer.", ".")
            candidates = (base_name, base_name.removeprefix(prefix))
            stored = next((candidate for candidate in candidates if candidate in self._files), None)
            if stored is None or self._shape(stored) != tuple(tensor.shape):
                return None
            names[name] = stored
        aliases = {name.replace(".base_layer.", ".") for name in model.state_dict()}  # tied weights by all their names
        expected = {*names.values(), *aliases, *(alias.removeprefix(prefix) for alias in aliases)}
        ignored = (*ignored_weights(model), "rotary_emb.inv_freq")
        if any(not any(re.search(pattern, name) for pattern in ignored) for name in self._files.keys() - expected):
            return None
        return names

    def rows(self, name: str, start: int, end: int) -> Tensor:
        """Reads the rows `start` to `end` of a tensor, by its name in the files."""
        with safe_open(self._files[name], framework="pt") as file:
            return file.get_slice(name)[start:end]

    def _shape(self, name: str) -> tuple[int, ...]:
        with safe_open(self._files[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())


def stored_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """A model's parameters and persistent buffers, by name; tied ones appear once."""
    return {**dict(model.named_parameters()), **persistent_buffers(model)}


def persistent_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """The buffers that are saved with a model's weights, by name."""
    names = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in names}
