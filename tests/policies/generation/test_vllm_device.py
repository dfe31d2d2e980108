"""Arguments and errors of vLLM engines on a GPU, without starting an engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from policies.generation import installed
from policies.generation.cuda import DeviceError
from policies.generation.installed import vllm_installed
from policies.generation.vllm_device import EngineStartError
from policies.generation.vllm_generator import BLOCK_TOKENS, VLLMGenerator
from policies.models.lora import Lora
from policies.models.model_names import BUNDLED_LM, model_path

pytestmark = pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")

GPU = torch.device("cuda", 0)
MODEL = model_path(BUNDLED_LM)


@pytest.fixture(autouse=True)
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretends that vLLM is installed for CUDA. Restores the environment afterwards."""
    before = dict(os.environ)
    monkeypatch.setattr(installed, "version", lambda name: "0.32.0")
    os.environ.pop("VLLM_USE_FLASHINFER_SAMPLER", None)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def engine_arguments(monkeypatch: pytest.MonkeyPatch, memory: float, **settings: Any) -> list[dict[str, Any]]:
    """Returns the arguments of a generator's engines on a GPU with `memory` bytes, without starting them."""
    from vllm.platforms import current_platform

    calls: list[dict[str, Any]] = []

    class Core:
        def __getattr__(self, name: str) -> Any:
            return Core()

    def fake_engine(path: str, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return Core()

    monkeypatch.setattr(type(current_platform), "get_device_total_memory", classmethod(lambda cls, n=0: int(memory)))
    monkeypatch.setattr("vllm.LLM", fake_engine)
    monkeypatch.setattr("policies.generation.vllm_generator.keep_process_groups", lambda engine: None)
    models = dict.fromkeys(("llm_1", "llm_2"), MODEL)
    common: dict[str, Any] = {"dtype": "fp32", "max_prompt_tokens": 52, "max_response_tokens": 12, "max_sequences": 128}
    VLLMGenerator(models, device=GPU, **{**common, **settings})
    return calls


def test_an_engine_on_a_gpu_gets_a_cache_of_the_needed_size_within_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = engine_arguments(monkeypatch, 80e9, gpu_share=0.5)
    assert len(engines) == 2
    for arguments in engines:
        # 128 contexts of two blocks, plus 16 spare blocks; keys and values of 4 layers, width 256, 4 bytes each
        assert arguments["kv_cache_memory_bytes"] == (128 * 2 + 16) * BLOCK_TOKENS * 2 * 4 * 256 * 4
        assert arguments["gpu_memory_utilization"] == pytest.approx(0.9 * 0.5 / 2)
        assert arguments["max_num_batched_tokens"] == 4096
        assert not {"block_size", "enforce_eager", "enable_chunked_prefill"} & arguments.keys()


@pytest.mark.parametrize(("sequences", "largest"), [(8, 16), (100, 112), (1000, 1008), (5000, 1024)])
def test_an_engine_on_a_gpu_compiles_nothing_and_captures_a_graph_of_a_full_batch(
    monkeypatch: pytest.MonkeyPatch, sequences: int, largest: int
) -> None:
    from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode

    for arguments in engine_arguments(monkeypatch, 80e9, max_sequences=sequences):
        config = CompilationConfig(**arguments["compilation_config"])
        assert config.mode == CompilationMode.NONE and config.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY
        assert config.max_cudagraph_capture_size == largest


def test_if_the_cache_does_not_fit_vllm_chooses_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [arguments["kv_cache_memory_bytes"] for arguments in engine_arguments(monkeypatch, 0.2e9)] == [None, None]
    engines = engine_arguments(monkeypatch, 80e9, max_prompt_tokens=4000, max_sequences=100_000)
    assert [arguments["kv_cache_memory_bytes"] for arguments in engines] == [None, None]
    assert [arguments["max_num_batched_tokens"] for arguments in engines] == [4096, 4096]
    (arguments, _) = engine_arguments(monkeypatch, 80e9, max_prompt_tokens=6000)
    assert arguments["max_num_batched_tokens"] == 6012


def test_flashinfers_sampler_is_only_used_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs

    engine_arguments(monkeypatch, 80e9)
    assert envs.VLLM_USE_FLASHINFER_SAMPLER is False
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
    engine_arguments(monkeypatch, 80e9)
    assert envs.VLLM_USE_FLASHINFER_SAMPLER is True


def test_an_engine_that_fails_to_start_on_a_gpu_names_the_gpu_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError("Free memory on device cuda:0 (1.2/15.0 GiB) on startup is less than desired.")

    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "get_device_total_memory", classmethod(lambda cls, n=0: 16 << 30))
    monkeypatch.setattr("vllm.LLM", fail)
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
            r"weights=lora conflicts with dtype=fp32: .* 16 bits only\. Set dtype=bf16, or backend=transformers\.$",
        ),
        (
            "auto",
            False,
            r"dtype=fp32 \(dtype=auto on a GPU without bf16\): .* only\. Set backend=transformers\.$",
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
