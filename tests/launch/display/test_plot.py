from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from launch.display.frame import Metrics
from launch.display.plot import draw_curves, draw_run, policy_curves
from launch.run_folder.frame import metrics_frame
from launch.run_folder.records import Update
from policies.settings.settings import Settings
from tests.launch.conftest import record_test_run
from tests.paper import paper_settings

BARE, LAST = "held out, bare query", "held out, last answer of the chain"


def recorded_updates(folder: Path, settings: Settings, kl: str = "bare_kl") -> list[Update]:
    """Returns the lines of a recorded run, whose evaluations have a last response from update 6 on."""
    lines = record_test_run(folder, settings).metrics
    for line in lines[6::6]:
        line["last_response"] = {"task_reward": 7.0, kl: 3.0, "combined_reward": 6.7}
        if kl == "bare_kl":
            line["last_response"]["in_chain_kl"] = 99.0
    for line in lines[1:]:
        for index, (role, figures) in enumerate(line["role"].items()):
            line["role"][role] = {**figures, "task_reward": 10.0 + index}
    return lines


def plot(lines: list[Update], settings: Settings) -> Figure:
    curves = policy_curves(Metrics({"run": metrics_frame(lines)}), settings)
    return draw_curves("", curves, [settings], {})


def legend(figure: Figure) -> dict[str, str]:
    """Returns the colours of the labels in the legend."""
    (entries,) = figure.legends
    return {
        text.get_text(): str(handle.get_color())  # type: ignore[union-attr]
        for text, handle in zip(entries.get_texts(), entries.legend_handles, strict=True)
    }


def drawn(figure: Figure, panel: int = 0) -> dict[tuple[str, str], list[float]]:
    """Returns the heights of the lines of a panel by colour and marker, rounded."""
    axes = figure.axes[panel]
    return {
        (str(line.get_color()), str(line.get_marker())): np.asarray(line.get_ydata(), float).round(2).tolist()
        for line in axes.lines
        if len(line.get_xdata()) > 2 or line.get_marker() != "None"  # type: ignore[arg-type]
    }


def test_a_single_update_is_visible(tmp_path: Path) -> None:
    settings = paper_settings()
    (line,) = record_test_run(tmp_path / "run", settings).metrics[1:2]
    line.pop("evaluation", None)
    assert {marker for _, marker in drawn(plot([line], settings))} == {"."}


@pytest.mark.parametrize("kl", ["bare_kl", "kl"])  # the latter in files of an earlier version
def test_the_last_answer_is_drawn_beside_the_policies_with_its_kl_on_the_bare_query(tmp_path: Path, kl: str) -> None:
    settings = paper_settings(num_updates=12)
    figure = plot(recorded_updates(tmp_path / "run", settings, kl), settings)
    colours, labels = legend(figure), [*legend(figure)]
    assert labels[:3] == ["llm_1", "llm_2", "last answer"] and {BARE, LAST} <= {*labels}
    assert drawn(figure)[colours["last answer"], "D"][-2:] == [7.0, 7.0]
    assert drawn(figure, 1)[colours["last answer"], "D"][-2:] == [3.0, 3.0]


def test_the_kl_of_unscored_responses_is_the_estimated_one(tmp_path: Path) -> None:
    settings = paper_settings(num_updates=12)
    lines = record_test_run(tmp_path / "run", settings).metrics
    for line in lines[1:]:
        for policy_id, figures in line["policy"].items():
            line["policy"][policy_id] = {**figures, "kl": None, "kl_k3": 4.5}
    figure = plot(lines, settings)
    assert drawn(figure, 1)[legend(figure)["llm_1"], "None"] == [4.5] * 12


@pytest.mark.parametrize("agents", [2, 3])
def test_one_llm_in_all_roles_has_a_curve_per_role(tmp_path: Path, agents: int) -> None:
    settings = paper_settings(num_updates=12, num_agents=agents, num_policies=1)
    figure = plot(recorded_updates(tmp_path / "run", settings), settings)
    colours, labels = legend(figure), [*legend(figure)]
    assert labels[:agents] == [*settings.agents] and "llm_1" not in labels and {BARE, LAST} <= {*labels}
    lines = drawn(figure)
    for index, role in enumerate(settings.agents):
        assert lines[colours[role], "None"] == [10.0 + index] * 12
    pioneer, last = colours[settings.agents[0]], colours[settings.agents[-1]]
    assert lines[last, "D"][-2:] == [7.0, 7.0] and (last, "o") not in lines
    assert lines[pioneer, "o"][-1] == pytest.approx(1.73, abs=0.01) and (pioneer, "D") not in lines


@pytest.mark.parametrize("settings", [paper_settings(num_agents=1), paper_settings(knowledge_transfer=False)])
def test_runs_without_last_answers_have_none_in_their_curves(tmp_path: Path, settings: Settings) -> None:
    lines = record_test_run(tmp_path / "run", settings).metrics
    labels = [*legend(plot(lines, settings))]
    assert labels[: len(settings.policy_ids)] == [*settings.policy_ids] and "last answer" not in labels
    assert LAST not in labels and BARE in labels


def test_curves_of_a_run_without_evaluations_are_drawn(tmp_path: Path) -> None:
    settings = paper_settings(num_policies=1)
    lines = record_test_run(tmp_path / "run", settings, updates=range(1, 4)).metrics
    draw_run(lines, settings, tmp_path / "curves.png")
    assert [*legend(plot(lines, settings))] == ["pioneer", "observer"]
