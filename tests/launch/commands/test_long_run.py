"""A run of some length: nothing grows, and a kill in its middle leaves nothing behind."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.long_run import SmallRun, growth, left_in_shared_memory, short_folder

UPDATES = 150


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as place:
        yield place


@pytest.mark.slow
def test_memory_and_handles_stay_flat_across_a_kill_and_nothing_is_left(folder: Path) -> None:
    since = time.time()
    run = SmallRun(folder, "transformers", UPDATES)
    run.kill_after(update=25, seconds=0.3)
    killed_at = run.update
    assert 25 <= killed_at < UPDATES
    looks = run.run_to_its_end(every=5)
    recorded = [json.loads(line)["update"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert recorded == list(range(UPDATES + 1))
    megabytes, handles = growth(looks)
    assert {"driver", "runner", "reward"} <= set(megabytes)
    for kind in ("driver", "runner", "reward"):
        assert megabytes[kind] < 40.0, (
            kind,
            looks,
        )  # allocators settle by some 20; an update's weights kept would be 70
        assert handles[kind] <= 2, (kind, looks)
    # psm_… and sem.mp-… are those of vLLM's engine processes, which another test kills; this run has none.
    left = left_in_shared_memory(since, patience=15.0)
    assert [name for name in left if not name.startswith(("psm_", "sem.mp-"))] == []
    assert len(list(run.temporary.iterdir())) == 1  # the killed process could not remove its own
