"""A long run: resource use does not grow, and a killed process leaves nothing behind."""

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
    with short_folder() as path:
        yield path


@pytest.mark.slow
def test_memory_and_handles_do_not_grow_and_a_kill_leaves_nothing_behind(folder: Path) -> None:
    since = time.time()
    run = SmallRun(folder, "transformers", UPDATES)
    run.kill_after(update=25, seconds=0.3)
    killed_at = run.update
    assert 25 <= killed_at < UPDATES
    measurements = run.run_to_its_end(every=5)
    recorded = [json.loads(line)["update"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert recorded == list(range(UPDATES + 1))
    megabytes, handles = growth(measurements)
    assert {"driver", "runner", "reward"} <= set(megabytes)
    for kind in ("driver", "runner", "reward"):
        assert megabytes[kind] < 40.0, (
            kind,
            measurements,
        )  # allocators settle by some 20; an update's weights kept would be 70
        assert handles[kind] <= 2, (kind, measurements)
    # psm_… and sem.mp-… are those of vLLM's engine processes, which another test kills; this run has none.
    leftovers = left_in_shared_memory(since, patience=15.0)
    assert [name for name in leftovers if not name.startswith(("psm_", "sem.mp-"))] == []
    assert len(list(run.temporary.iterdir())) == 1  # the killed process could not remove its own
