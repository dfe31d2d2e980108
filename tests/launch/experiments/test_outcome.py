"""What a search says in the end: points, intervals, the file and the plots."""

import csv
from pathlib import Path

import numpy as np
import pytest
from matplotlib.container import ErrorbarContainer
from ray.tune.experiment import Trial
from rich.console import Console

from launch.display.drawing import save
from launch.experiments.objective_plot import draw_objective
from launch.experiments.outcome import Point, TrialResult, collect_results, group_points, points_table, write_csv
from launch.experiments.space import Axis, read_axes
from launch.experiments.trials import Trials
from policies.settings.settings import Settings, make_settings

KEYS = ("exchange_period", "clip")
AXES = read_axes(["exchange_period=1,5,null", "lr=log:1e-6:1e-4"])


def result(number: int, period: int | None, seed: int, combined: float | None, status: str = "done") -> TrialResult:
    return TrialResult(
        trial=f"trial_{number:05d}",
        values={"exchange_period": period, "lr": 1e-5},
        seed=seed,
        status=status,
        updates=9 if status == "done" else 3,
        combined_reward=combined,
        task_reward=None if combined is None else combined + 1,
        kl=2.0,
        exchanges=0,
        seconds=1.5,
        reason="No room, no luck." if status == "failed" else "",
    )


RESULTS = [
    result(0, 1, 0, 0.1),
    result(1, 5, 0, 0.4),
    result(2, None, 0, None, "failed"),
    result(3, 1, 1, 0.2),
    result(4, 5, 1, 0.6),
    result(5, None, 1, 0.9, "stopped early"),
    result(6, 1, 2, 0.3),
    result(7, 5, 2, None),
]


def mean(point: Point) -> float | None:
    found = point.estimate("combined_reward")
    return found and found.mean


def test_points_are_means_over_their_seeds_and_one_whose_seeds_did_not_all_finish_is_not_the_best() -> None:
    points = group_points(RESULTS)
    assert [point.values["exchange_period"] for point in points] == [1, 5, None]
    assert [mean(point) for point in points] == [pytest.approx(0.2), pytest.approx(0.5), None]
    assert [(len(point.whole), point.complete) for point in points] == [(3, True), (2, False), (0, False)]
    apart = group_points(RESULTS, apart=True)
    assert [mean(point) for point in apart][:2] == [0.6, 0.4] and len(apart) == len(RESULTS)


def test_the_table_says_what_failed_and_what_was_stopped() -> None:
    console = Console(width=150)
    with console.capture() as capture:
        console.print(points_table(group_points(RESULTS), AXES))
    first, second, last = capture.get().splitlines()[2:]
    assert first.split()[:4] == ["1", "1e-05", "3", "+0.200"] and second.split()[2:5] == ["2", "of", "3"]
    assert "trial_00002 failed, trial_00005 stopped early at update 3, +0.900" in last


def trials(folder: Path, settings: Settings) -> Trials:
    made = Trials(folder, settings, [axis.key for axis in AXES], lambda settings: settings)
    made.values["t"] = {"seed": 0, "exchange_period": 5, "lr": 1e-5}
    return made


@pytest.mark.parametrize(("stop_on_collapse", "status"), [(True, "collapsed"), (False, "stopped early")])
def test_a_trial_that_a_scheduler_stopped_is_not_whole_because_a_warning_stood(
    stop_on_collapse: bool, status: str, tmp_path: Path
) -> None:
    trial = Trial("cory", stub=True, trial_id="t")
    trial.set_status(Trial.TERMINATED)
    trial.run_metadata.last_result = {"updates": 3, "combined_reward": 0.5, "cory": {"collapsed": True}}
    known = trials(tmp_path, Settings(updates=9, stop_on_collapse=stop_on_collapse))
    (found,) = collect_results([trial], known, AXES, {})
    assert (found.status, found.updates) == (status, 3)


@pytest.mark.parametrize(("select_by", "task_reward"), [("bare", 1.0), ("chain", 2.0), ("mean", 3.0)])
def test_the_figures_of_a_trial_are_of_those_whose_combined_reward_was_the_goal(
    select_by: str, task_reward: float, tmp_path: Path
) -> None:
    settings = make_settings({"select_by": select_by, "evaluate_average": True, "backend": "transformers"})
    trial = Trial("cory", stub=True, trial_id="t")
    evaluation = {"mean": {"task_reward": 1.0, "kl": 1.0}, "llm_mean": {"task_reward": 3.0, "kl": 3.0}}
    report = {"evaluation": evaluation, "last_answer": {"task_reward": 2.0, "kl": 2.0}}
    trial.run_metadata.last_result = {"updates": 3, "combined_reward": 0.5, "cory": report}
    (found,) = collect_results([trial], trials(tmp_path, settings), AXES, {"t": Trial.TERMINATED})
    assert (found.task_reward, found.kl) == (task_reward, task_reward)


def test_every_trial_is_in_the_file(tmp_path: Path) -> None:
    write_csv(RESULTS, tmp_path / "results.csv")
    lines = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [line["trial"] for line in lines] == [entry.trial for entry in RESULTS]
    assert [line["exchange_period"] for line in lines][:3] == ["1", "5", "null"]
    assert (lines[2]["status"], lines[2]["combined_reward"], lines[2]["reason"]) == ("failed", "", "No room, no luck.")


def test_plots_are_drawn_also_where_nothing_succeeded(tmp_path: Path) -> None:
    for name, results in (("some", RESULTS), ("none", [RESULTS[2]])):
        save(draw_objective(group_points(results), AXES), tmp_path / f"{name}-objective.png")
    assert [file.stat().st_size > 5_000 for file in tmp_path.iterdir()] == [True] * 2


def means(results: list[TrialResult], axes: list[Axis]) -> dict[str, tuple[list[float], list[float]]]:
    """What lines go through in the first panel: by label x and y."""
    panel = draw_objective(group_points(results), axes).axes[0]
    bars = [bar for bar in panel.containers if isinstance(bar, ErrorbarContainer)]
    lines = {bar.get_label(): bar.lines[0] for bar in bars}
    return {
        str(label): (np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist())
        for label, line in lines.items()
    }


def test_means_are_drawn_of_one_point_each_not_over_what_differs_in_another_setting_too() -> None:
    axes = read_axes(["exchange_period=1,5", "clip=0.1,0.3"])
    results = [
        result(10 * seed + number, None, seed, float(number + seed))._replace(
            values=dict(zip(KEYS, values, strict=True))
        )
        for seed in range(2)
        for number, values in enumerate([(1, 0.1), (5, 0.1), (1, 0.3), (5, 0.3)])
    ]
    assert means(results, axes) == {"clip=0.1": ([0, 1], [0.5, 1.5]), "clip=0.3": ([0, 1], [2.5, 3.5])}
    unlucky = [*results[:-1], results[-1]._replace(status="stopped early")]
    assert means(unlucky, axes) == {"clip=0.1": ([0, 1], [0.5, 1.5]), "clip=0.3": ([0], [2.5])}  # of complete points


def test_listed_values_that_are_alike_to_four_digits_stand_apart() -> None:
    axes = read_axes(["lr=1.00001e-5,1.00002e-5,1e-4"])
    results = [result(number, None, 0, 0.1)._replace(values={"lr": lr}) for number, lr in enumerate(axes[0].values)]
    panel = draw_objective(group_points(results), axes).axes[0]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["1.00001e-05", "1.00002e-05", "0.0001"]
    assert next(iter(means(results, axes).values()))[0] == [0, 1, 2]
