from pathlib import Path

import pytest
from matplotlib.image import imread

from launch.plot import plot
from policies.settings import Settings
from tests.launch.conftest import Cory, record


@pytest.mark.parametrize("agents", [1, 2, 8])
def test_a_recorded_run_is_drawn(tmp_path: Path, agents: int) -> None:
    record(tmp_path / "run", Settings(num_agents=agents, updates=12))
    assert plot(tmp_path / "run") == 0
    image = imread(tmp_path / "run" / "curves.png")
    assert image.shape[0] > 500 and image.shape[1] > 1500
    assert image[..., :3].std() > 0.05  # not a blank page


def test_a_run_in_its_first_updates_and_with_missing_figures_is_drawn(tmp_path: Path) -> None:
    run = record(tmp_path / "run", Settings(), updates=range(2))
    broken = run.updates()[1]
    broken["policy"]["llm_1"]["kl"] = None
    run.metrics.append({**broken, "update": 2})
    assert plot(tmp_path / "run", tmp_path / "elsewhere.pdf") == 0
    assert (tmp_path / "elsewhere.pdf").stat().st_size > 1000


def test_plot_says_where_the_curves_are(cory: Cory, tmp_path: Path) -> None:
    record(tmp_path / "run", Settings())
    result = cory("plot", "run")
    assert (result.returncode, result.stdout) == (0, "run/curves.png\n")


def test_a_run_without_metrics_cannot_be_drawn(cory: Cory, tmp_path: Path) -> None:
    record(tmp_path / "run", Settings(), updates=[])
    result = cory("plot", "run")
    assert result.returncode == 2 and "no metrics yet" in result.stderr
