"""Errors of vLLM engines that cannot start or load weights contain advice."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cory_env.tokenizer import DEFAULT_TOKENIZER
from policies.generation.installed import vllm_installed
from policies.generation.vllm_device import EngineStartError
from policies.generation.vllm_generator import VLLMGenerator
from policies.models.lora import Lora
from policies.models.model_check import ModelError
from tests.policies.generation.test_model_families import save_model

pytestmark = [
    pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed"),
    pytest.mark.timeout(300),
]


def start(path: Path, **settings: Any) -> None:
    shape: dict[str, Any] = {"max_prompt_tokens": 64, "max_response_tokens": 8, "max_sequences": 4}
    VLLMGenerator({"llm_1": str(path)}, dtype="fp32", device=torch.device("cpu"), **{**shape, **settings}).close()


def test_a_failed_engine_start_raises_a_short_error_with_advice(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(str(DEFAULT_TOKENIZER), folder)
    with pytest.raises(
        EngineStartError, match=r"max_model_len \(308\).* lower max_prompt_tokens, max_response_tokens"
    ) as raised:
        start(folder, max_prompt_tokens=300)
    message = str(raised.value)
    assert message.endswith("otherwise try backend=transformers.") and "\n" not in message and len(message) < 600
    (folder / "model.safetensors").unlink()
    with pytest.raises(EngineStartError, match="any model weights"):
        start(folder)


def test_a_family_without_lora_support_in_vllm_is_rejected(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model", "gptj", False)
    with pytest.raises(EngineStartError, match=r"does not support LoRA yet\. .* otherwise try backend=transformers\.$"):
        start(Path(path), lora=Lora(4, 8.0))


def test_weights_that_vllm_cannot_load_raise_a_short_error() -> None:
    shape: dict[str, Any] = {"max_prompt_tokens": 64, "max_response_tokens": 8, "max_sequences": 4}
    engine = VLLMGenerator({"llm_1": str(DEFAULT_TOKENIZER)}, dtype="fp32", device=torch.device("cpu"), **shape)
    try:
        with pytest.raises(
            ModelError, match=r"could not replace the weights of .* 'own' .*otherwise try backend=transformers\.$"
        ):
            engine.load("llm_1", {"transformer.own.weight": np.zeros(3, np.float32)}, 1)
    finally:
        engine.close()
