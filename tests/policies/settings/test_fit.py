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
    fit_micro_batch_tokens,
    learner_bytes,
)
from policies.settings.memory import estimate_learner, estimate_runner, model_shapes
from policies.settings.settings import Settings
from tests.paper import make_settings

ROWS = {"queries_per_update": 256, "minibatch_size": 256, "micro_batch_size": 256}
LENGTHS = {"max_prompt_tokens": 60, "max_response_tokens": 68}


def rows_of(**values: Any) -> Settings:
    return make_settings({**ROWS, **LENGTHS, "dtype": "fp32", **values})


def bytes_with(settings: Settings, tokens: int) -> float:
    limited = settings.model_copy(update={"micro_batch_tokens": tokens})
    return estimate_learner(limited, model_shapes(settings)).total


@pytest.mark.parametrize("values", [{}, {"weights": "lora"}, {"max_response_tokens": 900}])
@pytest.mark.parametrize("tokens", [512, 4096, 16384])
def test_micro_batches_are_the_largest_that_fit(values: dict[str, Any], tokens: int) -> None:
    settings = rows_of(**values)
    exact = bytes_with(settings, tokens)
    best = fit_micro_batch_tokens(settings, exact)
    assert best in MICRO_BATCH_TOKENS and bytes_with(settings, best) == exact
    assert best == 16384 or bytes_with(settings, 2 * best) > exact
    less = fit_micro_batch_tokens(settings, exact - 1)
    assert less is None if tokens == 512 else less is not None and less < tokens


def test_rows_of_a_micro_batch_remain_limited() -> None:
    one_row = rows_of(micro_batch_size=1)
    assert fit_micro_batch_tokens(one_row, bytes_with(one_row, 512)) == 16384  # one row has 128 tokens
    assert fit_micro_batch_tokens(rows_of(), bytes_with(one_row, 512)) is None


def test_learners_use_their_share_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_bytes", lambda: 80e9)
    half = rows_of(gpus_per_learner=0.5, gpus_per_runner=0.5, dtype="bf16")
    assert learner_bytes(half, model_shapes(half)) == 40e9
    two = rows_of(gpus_per_learner=1, gpus_per_runner=1, num_learners=2, dtype="bf16")
    assert learner_bytes(two, model_shapes(two)) == 80e9
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:1")
    assert learner_bytes(half, model_shapes(half)) == 40e9  # the driver learns here
    assert learner_bytes(two, model_shapes(two)) is None and choose_micro_batch_tokens(two) == ELSEWHERE_TOKENS


def test_learners_share_the_ram_that_runners_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    few, many, in_driver = rows_of(num_runners=1), rows_of(num_runners=3, num_learners=2), rows_of(num_runners=0)
    models, driver = model_shapes(few), 0.4e9
    runner = estimate_runner(few, models).total
    usable = runner + bytes_with(few, 1024) + 1
    monkeypatch.setattr(devices, "ram_bytes", lambda: usable / RAM_SHARE)
    assert learner_bytes(few, models) == pytest.approx(usable - runner)
    assert learner_bytes(many, models) == pytest.approx((usable - driver - 3 * runner) / 2)
    assert learner_bytes(in_driver, models) == pytest.approx(usable - estimate_runner(in_driver, models).total)
    assert choose_micro_batch_tokens(few) == 1024
    monkeypatch.setattr(devices, "ram_bytes", lambda: 1e12)
    assert choose_micro_batch_tokens(few) == MAX_CPU_TOKENS == 2048
    monkeypatch.setattr(devices, "ram_bytes", lambda: 1e8)
    assert choose_micro_batch_tokens(few) == 512  # does not fit; the check before a run rejects it


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
