"""`cory report` on the results of a study with known metrics."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from launch.commands.report import report
from launch.experiments.results import result_file
from launch.main import main
from launch.report import tables
from launch.report.plots import ablation_plots, comparison_plots, health_plots, pareto_plots
from launch.report.runs import group_arms, read_runs
from tests.launch.conftest import record_test_run
from tests.launch.results_of_studies import policy_metrics, study_run, write_runs


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three arms over three seeds; one run diverged, and one repeats itself."""
    folder = tmp_path_factory.mktemp("study")
    for seed in range(3):
        good, bad = policy_metrics(1.0 + seed, 2.0), policy_metrics(1.0 + seed, 4.0)
        write_runs(folder, study_run("cory", seed, good, bad)._replace(label="CORY <1>"))
        ppo = study_run("ppo", seed, policy_metrics(0.5 + seed, 8.0, repetition=0.3 if seed == 1 else 0.0), arm_index=1)
        write_runs(folder, ppo._replace(label="PPO", against="cory"))
        changed: dict[str, Any] = {"kl_coef": 0.3, "eval_kl_coef": 0.1}
        strict = study_run(
            "cory-eta", seed, good, good, arm_index=2, status="diverged" if seed == 2 else "done", **changed
        )
        write_runs(folder, strict._replace(label="CORY η", against="cory", reason="not finite" if seed == 2 else None))
    return folder


def test_arms_have_the_labels_of_the_study(study: Path) -> None:
    arms = group_arms(read_runs([study]))
    assert [(arm.label, [run.name for run in arm.runs]) for arm in arms] == [
        ("CORY <1>", ["cory/0", "cory/1", "cory/2"]),
        ("PPO", ["ppo/0", "ppo/1", "ppo/2"]),
        ("CORY η", ["cory-eta/0", "cory-eta/1", "cory-eta/2"]),
    ]


def test_metrics_are_from_the_last_evaluation(study: Path) -> None:
    cory, ppo, eta = tables.arm_rows(group_arms(read_runs([study])))
    # Means 2, 3 and 1.7; the task rewards 1, 2, 3 have deviation 1; t of 2 degrees of freedom is 4.303.
    assert cory["figures"][0] == ("+2.00", "-0.48\u00a0… +4.48")
    assert [cell.text for cell in cory["figures"]] == ["+2.00", "3.00", "+1.70"]
    assert (cory["collapsed"], ppo["collapsed"], eta["collapsed"]) == (0, 1, 1)
    assert eta["figures"][0].text == "+1.50" and eta["figures"][0].small.endswith(", 2 of 3")  # one diverged
    assert cory["last"] == []  # the chain's last responses were not recorded
    assert cory["more"][1].text == "-"  # influence was not measured
    assert cory["more"][3].text == "0.2"  # 10 s of updates


def test_differences_are_paired_by_seed(study: Path) -> None:
    ppo, eta = tables.difference_rows(group_arms(read_runs([study])))
    assert (ppo["label"], ppo["against"], ppo["seeds"]) == ("PPO", "CORY <1>", 3)
    assert ppo["figures"][0] == ("-0.50", "-0.50\u00a0… -0.50, p\u00a00.25")
    assert [cell.text for cell in eta["figures"]] == ["+0.00", "-1.00", "+0.10"] and eta["seeds"] == 2


def test_runs_of_the_same_arm_with_different_settings_are_separate_arms(study: Path, tmp_path: Path) -> None:
    write_runs(tmp_path, study_run("cory", 7, policy_metrics(1.0, 2.0), policy_metrics(1.0, 2.0), lr=1.0))
    arms = group_arms(read_runs([study, tmp_path]))
    assert [(arm.label, len(arm.runs)) for arm in arms if "CORY <1>" in arm.label or arm.label.startswith("cory")] == [
        ("CORY <1>", 3),
        ("cory", 1),
    ]
    assert [len(arm.runs) for arm in group_arms(read_runs([study, study]))] == [3, 3, 3]


def test_the_page_shows_divergence_and_collapse(study: Path, tmp_path: Path) -> None:
    report([str(study)], tmp_path / "study.html")
    html = (tmp_path / "study.html").read_text(encoding="utf-8")
    for text in (
        "Study imdb",
        "CORY &lt;1&gt;",
        "diverged<small>not finite</small>",
        '3<small class="alarm">1 collapsed</small>',
        "llm_1 repeats itself: 30% of its token pairs",
    ):
        assert text in html, text
    assert "<1>" not in html


def test_the_pareto_plot_shows_each_arm_with_its_interval(study: Path) -> None:
    (plot,) = pareto_plots(group_arms(read_runs([study])))
    assert plot.panels[0].alt == "CORY <1>: 2.00 at KL 3.00; PPO: 1.50 at KL 8.00; CORY η: 1.50 at KL 2.00"
    assert [key.label for key in plot.legend] == ["CORY <1>", "PPO", "CORY η"] and "95 % interval" in plot.note
    panel = Figure().subplots()
    plot.panels[0].draw(panel)
    vertical = panel.lines[2].get_ydata()  # the lines before it are the runs and the KL interval
    assert list(np.asarray(vertical)) == pytest.approx([2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5], abs=1e-3)


def test_each_tier_has_its_own_plot(study: Path, tmp_path: Path) -> None:
    (plot,) = ablation_plots(group_arms(read_runs([study])))
    assert plot.name == "ablation" and plot.panels[0].alt == "CORY <1>: 1.70; PPO: 0.70; CORY η: 1.30"
    for index, tier in enumerate((1, 1, 2)):
        run = study_run(f"arm-{index}", 0, *[policy_metrics(index, 0.0)] * 2, arm_index=index)
        write_runs(tmp_path, run._replace(tier=tier, label=f"arm {index}"))
    plots = ablation_plots(group_arms(read_runs([tmp_path])))
    assert [(plot.name, plot.title) for plot in plots] == [
        ("ablation", "Final combined reward"),
        ("ablation-tier-2", "Final combined reward, tier 2"),
    ]
    assert [plot.panels[0].alt for plot in plots] == ["arm 0: 0.00; arm 1: 1.00", "arm 2: 2.00"]


def test_many_arms_are_split_into_several_plots_without_unevaluated_arms(tmp_path: Path) -> None:
    for index in range(8):
        run = study_run(f"arm-{index}", 0, policy_metrics(1.0, 1.0), arm_index=index)
        write_runs(tmp_path, run._replace(metrics=run.metrics if index else []))
    plots = comparison_plots(group_arms(read_runs([tmp_path])))
    assert [[key.label for key in plot.legend] for plot in plots] == [
        ["arm-1", "arm-2", "arm-3", "arm-4"],
        ["arm-5", "arm-6", "arm-7"],
    ]
    assert plots[0].panels[0].alt.startswith("Task reward. arm-1 ends at 1.00; arm-2")


def test_curves_show_every_arms_interval_and_mention_it_only_if_drawn(tmp_path: Path) -> None:
    for index in range(6):
        for seed in range(3):
            write_runs(
                tmp_path,
                study_run(f"arm-{index}", seed, policy_metrics(1.0, 1.0), arm_index=index, training=(0.0, float(seed))),
            )
    arms = group_arms(read_runs([tmp_path]))
    (plot,) = comparison_plots(arms)
    assert "Held-out queries" in plot.note and "95 % interval" in plot.note
    panel = Figure().subplots()
    plot.panels[0].draw(panel)
    bars = [artist for artist in panel.collections if isinstance(artist, LineCollection)]
    assert len(bars) == 6 and len({bar.get_segments()[0][0][0] for bar in bars}) == 6  # none overlap
    write_runs(
        tmp_path / "few", study_run("arm", 0, policy_metrics(1.0, 1.0)), study_run("arm", 1, policy_metrics(1.0, 1.0))
    )
    assert "interval" not in comparison_plots(group_arms(read_runs([tmp_path / "few"])))[0].note  # only two seeds


def test_signs_of_collapse_are_plotted_with_their_limits(tmp_path: Path) -> None:
    run = study_run("ppo", 0, policy_metrics(1.0, 1.0), training=(0.0,))
    run.metrics[0]["policy"]["llm_1"] |= {"kl": 6.0, "response_length": 4.0}
    write_runs(tmp_path, run)
    (plot,) = health_plots(group_arms(read_runs([tmp_path])))
    assert [panel.alt.partition(". ")[2] for panel in plot.panels] == [
        "",  # no value
        "",
        "ppo ends at 1.50",
        "ppo ends at 4.00",
    ]
    panel = Figure().subplots()
    plot.panels[2].draw(panel)
    assert panel.lines[0].get_ydata() == [2.0, 2.0]  # max_token_kl
    run.metrics[0]["policy"]["llm_1"] |= {"thought_cut_rate": 0.25}
    write_runs(tmp_path, run)
    (plot,) = health_plots(group_arms(read_runs([tmp_path])))
    assert plot.panels[2].alt == "Thoughts cut off. ppo ends at 0.25"


def test_studies_and_runs_can_be_combined(study: Path, tmp_path: Path) -> None:
    run = record_test_run(
        tmp_path / "run", study_run("", 0, policy_metrics(1.0, 2.0)).settings.model_copy(update={"lr": 1e-3})
    )
    arms = group_arms(read_runs([study, run.path]))
    assert [arm.label for arm in arms] == ["CORY <1>", "PPO", "CORY η", "PPO (run)"]
    (plot,) = comparison_plots(arms)
    assert [key.label for key in plot.legend] == [arm.label for arm in arms]


def test_a_damaged_result_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = result_file(tmp_path, "cory", 0)
    file.parent.mkdir(parents=True)
    file.write_text("{")
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "out.html")]) == 2
    assert "seed_0.json is not a valid study result" in capsys.readouterr().err
    assert not (tmp_path / "out.html").exists()
