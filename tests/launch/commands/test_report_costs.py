"""What runs cost, against sums worked out by hand."""

from pathlib import Path

import pytest

from launch.report.plots import COSTS, over_cost
from launch.report.runs import arms_of, read_run
from policies.settings.settings import Settings
from tests.launch.conftest import record


def test_curves_stand_over_the_mean_of_what_the_runs_had_cost_until_then(tmp_path: Path) -> None:
    runs = []
    for seed in (0, 1):
        folder = record(tmp_path / str(seed), Settings(seed=seed, epochs=3)).path
        runs.append(read_run(folder, str(seed)))
    (arm,) = arms_of(runs)
    for at, run in enumerate(arm.runs):
        for line in run.updates:
            if "policy" in line:
                line["tokens"] = 1000 * (1 + at)
                line["seconds"] = {"total": 60.0, "evaluate": 30.0}
    found = {cost: list(over_cost(arm, cost).index) for cost in COSTS}
    updates = sorted(line["update"] for line in arm.runs[0].updates if "evaluation" in line)
    assert len(updates) > 1 and updates[0] == 0
    assert found["1000 tokens generated"] == pytest.approx([1.5 * update for update in updates])
    assert found["1000 tokens learned from"] == pytest.approx([4.5 * update for update in updates])
    assert found["minutes"] == pytest.approx([0.5 * update for update in updates])
