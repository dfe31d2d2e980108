"""Micro-batches that fit into the memory of a device, and how much memory there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from policies.settings.hardware import devices
from policies.settings.hardware.fit import (
    ELSEWHERE_TOKENS,
    MAX_CPU_TOKENS,
    MICRO_BATCH_TOKENS,
    RAM_SHARE,
    choose_micro_batch_tokens,
)
from policies.settings.memory import estimate_learner, model_shapes
from policies.settings.settings import Settings
from tests.paper import make_settings

ROWS = {"queries_per_update": 256, "minibatch_size": 256, "micro_batch_size": 256}
LENGTHS = {"max_prompt_tokens": 60, "max_response_tokens": 68}
ON_GPU = {"gpus_per_learner": 1, "num_learners": 1, "backend": "transformers"}


def rows_of(**values: Any) -> Settings:
    return make_settings({**ROWS, **LENGTHS, "dtype": "fp32", **values})


def bytes_with(settings: Settings, tokens: int) -> float:
    limited = settings.model_copy(update={"micro_batch_tokens": tokens})
    return estimate_learner(limited, model_shapes(settings)).total


@pytest.mark.parametrize("values", [{}, {"weights": "lora"}, {"max_response_tokens": 900}])
@pytest.mark.parametrize("tokens", [512, 4096, 16384])
def test_micro_batches_are_the_largest_that_fit(values: dict[str, Any], tokens: int) -> None:
    settings = rows_of(**ON_GPU, **values)
    exact = bytes_with(settings, tokens)
    best = choose_micro_batch_tokens(settings, gpu=exact)
    assert best in MICRO_BATCH_TOKENS and bytes_with(settings, best) == exact
    assert best == 16384 or bytes_with(settings, 2 * best) > exact
    assert choose_micro_batch_tokens(settings, gpu=exact - 1) < max(best, 513)  # with 512, the check before a run fails


def test_learners_use_their_share_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    half = rows_of(gpus_per_learner=0.5, gpus_per_runner=0.5, dtype="bf16", max_response_tokens=900)
    exact = bytes_with(half, 1024)
    monkeypatch.setattr(devices, "gpu_bytes", lambda: 2 * exact)
    assert choose_micro_batch_tokens(half) == choose_micro_batch_tokens(half, gpu=2 * exact) == 1024
    two = rows_of(gpus_per_learner=1, gpus_per_runner=1, num_learners=2, dtype="bf16")
    assert choose_micro_batch_tokens(two, gpu=1e15) == 16384
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:1")
    assert choose_micro_batch_tokens(half) == 1024  # the driver learns here
    assert choose_micro_batch_tokens(two) == ELSEWHERE_TOKENS


def test_learners_share_half_of_the_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    one, two = rows_of(), rows_of(num_learners=2)
    ram = (bytes_with(one, 1024) + 1) / RAM_SHARE
    monkeypatch.setattr(devices, "ram_bytes", lambda: ram)
    assert choose_micro_batch_tokens(one) == 1024 > choose_micro_batch_tokens(two)
    assert choose_micro_batch_tokens(two, ram=2 * ram) == 1024
    assert choose_micro_batch_tokens(one, ram=1e12) == MAX_CPU_TOKENS == 2048
    assert choose_micro_batch_tokens(one, ram=1e8) == 512  # does not fit; the check before a run rejects it


@pytest.mark.parametrize(
    ("membership", "limits", "limit"),
    [
        ("0::/user/job\n", {"user/job/memory.max": "max", "user/memory.max": "2000000"}, 2e6),
        ("0::/\n", {"memory.max": "3000000\n"}, 3e6),
        ("0::/not/mounted\n", {"memory.max": "3000000\n"}, 3e6),
        ("4:cpu,memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": "4000000\n"}, 4e6),
        ("3:cpu:/job\n", {"memory/job/memory.limit_in_bytes": "4000000\n"}, None),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("", {}, None),
    ],
)
def test_the_smallest_limit_of_a_control_group_counts(
    membership: str, limits: dict[str, str], limit: float | None, tmp_path: Path
) -> None:
    (tmp_path / "membership").write_text(membership)
    for name, text in limits.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    machine = devices.ram_bytes(tmp_path / "none", tmp_path / "none")
    assert machine > 1e8
    assert devices.ram_bytes(tmp_path, tmp_path / "membership") == (machine if limit is None else limit)
