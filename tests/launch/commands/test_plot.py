from pathlib import Path

import pytest
from matplotlib.image import imread

from launch.main import main
from tests.launch.conftest import Cory, record_test_run
from tests.paper import paper_settings


@pytest.mark.parametrize("agents", [1, 2, 8])
def test_a_recorded_run_is_drawn(tmp_path: Path, agents: int) -> None:
    record_test_run(tmp_path / "run", paper_settings(num_agents=agents, num_updates=12))
    assert main(["plot", str(tmp_path / "run")]) == 0
    image = imread(tmp_path / "run" / "curves.png")
    assert image.shape[0] > 500 and image.shape[1] > 1500
    assert image[..., :3].std() > 0.05  # not a blank page


def test_a_run_in_its_first_updates_and_with_missing_figures_is_drawn(tmp_path: Path) -> None:
    run = record_test_run(tmp_path / "run", paper_settings(), updates=range(2))
    broken = run.metrics[1]
    broken["policy"]["llm_1"]["kl"] = None
    run.metrics_file.append({**broken, "update": 2})
    assert main(["plot", str(tmp_path / "run"), "--out", str(tmp_path / "elsewhere.pdf")]) == 0
    assert (tmp_path / "elsewhere.pdf").stat().st_size > 1000


def test_plot_prints_the_path_of_the_image(cory_in_process: Cory, tmp_path: Path) -> None:
    record_test_run(tmp_path / "run", paper_settings())
    result = cory_in_process("plot", "run")
    assert (result.returncode, result.stdout) == (0, "run/curves.png\n")


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("curves.foo", "curves.foo is not an image file. Use one of the suffixes ."),
        ("run", "run is not an image file."),
        ("occupied/curves.png", "The folder occupied cannot be created: File exists."),
        ("s3://bucket/curves.png", "s3://bucket/curves.png is a URI, but must be a path"),
    ],
)
def test_an_invalid_image_path_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], out: str, message: str
) -> None:
    record_test_run(tmp_path / "run", paper_settings())
    (tmp_path / "occupied").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["plot", "run", "--out", out]) == 2
    assert message in capsys.readouterr().err


def test_the_folder_of_the_image_is_created_without_temporary_files(tmp_path: Path) -> None:
    record_test_run(tmp_path / "run", paper_settings())
    assert main(["plot", str(tmp_path / "run"), "--out", str(tmp_path / "new" / "curves.svg")]) == 0
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["curves.svg"]


def test_a_run_without_metrics_cannot_be_drawn(cory_in_process: Cory, tmp_path: Path) -> None:
    record_test_run(tmp_path / "run", paper_settings(), updates=[])
    result = cory_in_process("plot", "run")
    assert result.returncode == 2 and "no metrics yet" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "other", "--out", "c.png"], "other is not a run's folder"),
        (["run", "run", "--out", "c.foo"], "c.foo is not an image file."),
    ],
)
def test_invalid_arguments_leave_no_files(
    cory_in_process: Cory, tmp_path: Path, words: list[str], message: str
) -> None:
    record_test_run(tmp_path / "run", paper_settings())
    result = cory_in_process("plot", *words)
    assert result.returncode == 2 and message in result.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
