"""Fingerprints quickly detect changed model files, even of the same size."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from policies.models.fingerprint import SMALL_FILE_BYTES, model_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    return tmp_path


def test_a_change_of_any_tensor_of_a_large_file_is_detected(folder: Path) -> None:
    tensors = {f"layer_{number}.weight": torch.zeros(64, 4096) for number in range(40)}
    file = folder / "model.safetensors"
    save_file(tensors, file)
    assert file.stat().st_size > 2 * SMALL_FILE_BYTES
    before = model_files(str(folder))
    assert model_files(str(folder)) == before
    for name in ("layer_0.weight", "layer_17.weight", "layer_39.weight"):
        save_file({**tensors, name: torch.ones(64, 4096)}, file)
        assert model_files(str(folder))["model.safetensors"] != before["model.safetensors"], name
    tensors["layer_33.bias"] = torch.zeros(8)  # evenly spaced blocks would miss it
    save_file(tensors, file)
    before = model_files(str(folder))
    save_file({**tensors, "layer_33.bias": torch.ones(8)}, file)
    assert model_files(str(folder))["model.safetensors"] != before["model.safetensors"]
    tensors["layer_0.bias"] = tensors.pop("layer_0.weight")  # another name, the same numbers
    save_file(tensors, file)
    assert model_files(str(folder))["model.safetensors"] != before["model.safetensors"]


def bytes_read() -> int:
    """Bytes that this process has read."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_little_of_a_large_model_is_read(folder: Path) -> None:
    """Three sparse files of 5 GB."""
    header = ",".join(
        f'"layer_{n}":{{"dtype":"F32","shape":[1],"data_offsets":[{n * 2**24},{(n + 1) * 2**24}]}}' for n in range(300)
    )
    text = f"{{{header}}}".encode()
    for number in range(3):
        file = folder / f"model-0000{number}-of-00003.safetensors"
        file.write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(file, 5 * 10**9)
    before = bytes_read()
    assert len(model_files(str(folder))) == 4
    assert 3 * SMALL_FILE_BYTES < bytes_read() - before < 3 * (SMALL_FILE_BYTES + 8 * 10**6)


def test_a_weight_file_that_is_not_safetensors_is_sampled_too(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(b"x" * (SMALL_FILE_BYTES + 5000))
    before = model_files(str(folder))
    file.write_bytes(b"y" * (SMALL_FILE_BYTES + 5000))
    assert model_files(str(folder)) != before


def test_files_that_are_not_part_of_the_model_are_ignored(folder: Path) -> None:
    before = model_files(str(folder))
    for name in ("README.md", "trainer_state.json", "log.txt"):
        (folder / name).write_text("{}")
    assert model_files(str(folder)) == before
    (folder / "modeling_own.py").write_text("pass")
    assert model_files(str(folder)) != before
