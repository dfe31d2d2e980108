"""What vLLM's engines would be told on a GPU, where there is none: no engine starts here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from policies.generation import installed
from policies.generation.cuda import DeviceError
from policies.generation.installed import vllm_installed
from policies.generation.vllm_generator import BLOCK_TOKENS, EngineStartError, VLLMGenerator
from policies.models.lora import Lora
from policies.models.model_names import BUNDLED_LM, model_path

pytestmark = pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")

GPU = torch.device("cuda", 0)
MODEL = model_path(BUNDLED_LM)


@pytest.fixture(autouse=True)
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Installs vLLM for CUDA, by its name; its engines are recorded instead of started. Puts the environment back."""
    before = dict(os.environ)
    monkeypatch.setattr(installed, "version", lambda name: "0.32.0")
    os.environ.pop("VLLM_USE_FLASHINFER_SAMPLER", None)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def engine_arguments(monkeypatch: pytest.MonkeyPatch, memory: float, **settings: Any) -> list[dict[str, Any]]:
    """What the engines of a generator are told on a GPU of so many bytes."""
    from vllm.platforms import current_platform

    told: list[dict[str, Any]] = []

    class Core:
        def __getattr__(self, name: str) -> Any:
            return Core()

    def engine(path: str, **given: Any) -> Any:
        told.append(given)
        return Core()

    monkeypatch.setattr(type(current_platform), "get_device_total_memory", classmethod(lambda cls, n=0: int(memory)))
    monkeypatch.setattr("vllm.LLM", engine)
    monkeypatch.setattr("policies.generation.vllm_generator.keep_process_groups", lambda engine: None)
    models = dict.fromkeys(("llm_1", "llm_2"), MODEL)
    common: dict[str, Any] = {"dtype": "fp32", "max_prompt_tokens": 52, "max_response_tokens": 12, "max_sequences": 128}
    VLLMGenerator(models, device=GPU, **{**common, **settings})
    return told


def test_an_engine_on_a_gpu_gets_a_cache_of_the_needed_size_within_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    told = engine_arguments(monkeypatch, 80e9, gpu_share=0.5)
    assert len(told) == 2
    for given in told:
        # 128 contexts of two blocks, and 16 blocks to spare; keys and values of 4 layers, 256 wide, 4 bytes each
        assert given["kv_cache_memory_bytes"] == (128 * 2 + 16) * BLOCK_TOKENS * 2 * 4 * 256 * 4
        assert given["gpu_memory_utilization"] == pytest.approx(0.9 * 0.5 / 2)
        assert given["max_num_batched_tokens"] == 4096
        assert not {"block_size", "enforce_eager", "enable_chunked_prefill"} & given.keys()


def test_if_the_cache_does_not_fit_vllm_chooses_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [given["kv_cache_memory_bytes"] for given in engine_arguments(monkeypatch, 0.2e9)] == [None, None]
    many = engine_arguments(monkeypatch, 80e9, max_prompt_tokens=4000, max_sequences=100_000)
    assert [given["kv_cache_memory_bytes"] for given in many] == [None, None]
    assert [given["max_num_batched_tokens"] for given in many] == [4096, 4096]
    (given, _) = engine_arguments(monkeypatch, 80e9, max_prompt_tokens=6000)
    assert given["max_num_batched_tokens"] == 6012


def test_flashinfers_sampler_is_only_used_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs

    engine_arguments(monkeypatch, 80e9)
    assert envs.VLLM_USE_FLASHINFER_SAMPLER is False
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
    engine_arguments(monkeypatch, 80e9)
    assert envs.VLLM_USE_FLASHINFER_SAMPLER is True


def test_an_engine_that_fails_to_start_on_a_gpu_names_the_gpu_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **given: Any) -> None:
        raise ValueError("Free memory on device cuda:0 (1.2/15.0 GiB) on startup is less than desired.")

    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "get_device_total_memory", classmethod(lambda cls, n=0: 16 << 30))
    monkeypatch.setattr("vllm.LLM", refuse)
    with pytest.raises(EngineStartError) as raised:
        VLLMGenerator(
            {"llm_1": MODEL}, device=GPU, dtype="fp32", max_prompt_tokens=8, max_response_tokens=8, max_sequences=4
        )
    assert str(raised.value).endswith(
        "ValueError: Free memory on device cuda:0 (1.2/15.0 GiB) on startup is less than desired. If it ran out of "
        "memory, raise gpus_per_runner or tensor_parallel_size, or lower max_prompt_tokens, max_response_tokens, "
        "queries_per_update or num_agents; otherwise try backend=transformers."
    )


@pytest.mark.parametrize(
    ("dtype", "bf16", "message"),
    [
        (
            "fp32",
            True,
            r"weights=lora conflicts with dtype=fp32: .* 16 bits\. Set dtype=bf16, or backend=transformers\.$",
        ),
        (
            "auto",
            False,
            r"dtype=fp32 \(dtype=auto, because this GPU has no bf16\): .* bits\. Set backend=transformers\.$",
        ),
        ("auto", True, None),
        ("bf16", True, None),
    ],
)
def test_adapters_in_fp32_are_rejected_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, dtype: str, bf16: bool, message: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
    monkeypatch.setattr("policies.generation.vllm_lora.engine_arguments", lambda *_: {})
    if message is None:
        assert len(engine_arguments(monkeypatch, 80e9, dtype=dtype, lora=Lora(4, 8.0))) == 1
        return
    with pytest.raises(DeviceError, match=message):
        engine_arguments(monkeypatch, 80e9, dtype=dtype, lora=Lora(4, 8.0))


def test_engines_reject_a_device_that_the_build_does_not_support(monkeypatch: pytest.MonkeyPatch) -> None:
    common: dict[str, Any] = {"dtype": "fp32", "max_prompt_tokens": 8, "max_response_tokens": 8, "max_sequences": 4}
    with pytest.raises(DeviceError, match="The installed vLLM is built for CUDA"):
        VLLMGenerator({"llm_1": MODEL}, device=torch.device("cpu"), **common)
    monkeypatch.setattr(installed, "version", lambda name: "0.32.0+cpu")
    with pytest.raises(DeviceError, match="built for CPUs, but runs on a GPU"):
        VLLMGenerator({"llm_1": MODEL}, device=GPU, **common)
