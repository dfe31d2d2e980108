"""What kept a vLLM engine from starting is told with what helps; memory only where it is the cause."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from cory_env.tokenizer import DEFAULT_TOKENIZER
from policies.generation.generator import GenerationError
from policies.generation.installed import vllm_installed
from policies.generation.vllm_errors import explain, explained
from policies.generation.vllm_generator import EngineStartError, VLLMGenerator
from policies.models.lora import Lora
from policies.models.model_check import ModelError
from tests.policies.generation.test_model_families import save_model

pytestmark = [
    pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed"),
    pytest.mark.timeout(300),
]

Spoil = Callable[[Path], None]


def start(path: Path, **settings: Any) -> None:
    shape: dict[str, Any] = {"max_prompt": 64, "max_response": 8, "max_sequences": 4}
    VLLMGenerator({"llm_1": str(path)}, dtype="fp32", device=torch.device("cpu"), **{**shape, **settings}).close()


def configured(**changes: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return spoil


def of_no_class(folder: Path) -> None:
    CONFIG_MAPPING["gpt_neo"](architectures=["GPTNeoForCausalLM"]).save_pretrained(folder)


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def with_another_head(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = {name: x[:100] if "wte" in name else x for name, x in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


CASES: dict[str, tuple[Spoil, dict[str, Any], str]] = {
    "family": (of_no_class, {}, r"GPTNeoForCausalLM.* Use another model, or backend=transformers\.$"),
    "context": (lambda _: None, {"max_prompt": 300}, r"max_model_len \(308\).* Lower max_prompt or max_response\.$"),
    "quantized": (
        configured(quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}),
        {},
        r"awq.* Use the model without its quantization\.$",
    ),
    "no weights": (without_weights, {}, r"any model weights.* Copy or download the model again\.$"),
    "cut weights": (cut, {}, r"SafetensorError: .* Copy or download the model again\.$"),
    "another shape": (with_another_head, {}, r"AssertionError: in .*\.py:\d+.* use backend=transformers\.$"),
    "heads": (lambda _: None, {"tensor_parallel": 3}, r"divisible by .* Set tensor_parallel to a number that divides"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_cause_is_told_with_what_helps(tmp_path: Path, case: str) -> None:
    spoil, settings, message = CASES[case]
    folder = tmp_path / "model"
    shutil.copytree(str(DEFAULT_TOKENIZER), folder)
    spoil(folder)
    with pytest.raises(EngineStartError, match=message) as raised:
        start(folder, **settings)
    said = str(raised.value)
    assert "emory" not in said and "pydantic" not in said and "\n" not in said and len(said) < 600


def test_a_family_that_takes_no_adapters_in_vllm_is_told(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model", "gptj", False)
    with pytest.raises(EngineStartError, match=r"does not support LoRA yet\. Set weights=full, or backend"):
        start(Path(path), lora=Lora(4, 8.0))


def test_code_of_a_model_s_own_is_told_with_the_setting(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(str(DEFAULT_TOKENIZER), folder)
    configured(model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})(folder)
    with pytest.raises(ModelError, match=r"Python code of its own\. If you trust it, set trust_remote_code=true\."):
        start(folder)


def test_weights_that_vllm_has_no_place_for_are_told_in_a_sentence() -> None:
    shape: dict[str, Any] = {"max_prompt": 64, "max_response": 8, "max_sequences": 4}
    engine = VLLMGenerator({"llm_1": str(DEFAULT_TOKENIZER)}, dtype="fp32", device=torch.device("cpu"), **shape)
    try:
        with pytest.raises(ModelError, match=r"could not replace the weights of .* 'own' .*backend=transformers\.$"):
            engine.load("llm_1", {"transformer.own.weight": np.zeros(3, np.float32)}, 1)
    finally:
        engine.close()


def test_memory_is_named_where_it_is_the_cause() -> None:
    advice = "lower max_prompt, max_response, queries or num_agents"
    for take in (lambda: torch.empty(2**50), lambda: bytearray(2**50)):
        with pytest.raises((RuntimeError, MemoryError)) as raised:
            take()
        assert explain(raised.value, advice).endswith(f"Memory is short: {advice}.")


def test_an_error_after_which_weights_are_sent_again_stays_what_it_is() -> None:
    with pytest.raises(GenerationError, match="other weights"), explained("load", ModelError, "lower queries"):
        raise GenerationError("The workers read other weights.")
    said = r"vLLM could not load: ValueError: no such name\. "
    with pytest.raises(ModelError, match=said), explained("load", ModelError, "lower queries"):
        raise ValueError("no such name")
