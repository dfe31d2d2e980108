"""What a search says in the end: points, intervals, the file and the plots."""

import csv
from pathlib import Path

import pytest
from ray.tune.experiment import Trial
from rich.console import Console

from launch.search.outcome import Row, points_of, rows_of, table, write_csv
from launch.search.plots import draw_objective, draw_parallel
from launch.search.space import read_axes

AXES = read_axes(["exchange_period=1,5,null", "lr=log:1e-6:1e-4"])


def row(number: int, period: int | None, seed: int, combined: float | None, status: str = "done") -> Row:
    return Row(
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


ROWS = [
    row(0, 1, 0, 0.1),
    row(1, 5, 0, 0.4),
    row(2, None, 0, None, "failed"),
    row(3, 1, 1, 0.2),
    row(4, 5, 1, 0.6),
    row(5, None, 1, 0.9, "stopped early"),
    row(6, 1, 2, 0.3),
    row(7, 5, 2, None),
]


def test_points_are_means_over_the_seeds_that_ran_to_their_end_best_first() -> None:
    points = points_of(ROWS)
    assert [point.values["exchange_period"] for point in points] == [5, 1, None]
    assert [point.mean("combined_reward") for point in points] == [pytest.approx(0.5), pytest.approx(0.2), None]
    assert [len(point.whole) for point in points] == [2, 3, 0]
    apart = points_of(ROWS, apart=True)
    assert [point.mean("combined_reward") for point in apart][:2] == [0.6, 0.4] and len(apart) == len(ROWS)


def test_the_table_says_what_failed_and_what_was_stopped() -> None:
    console = Console(width=150)
    with console.capture() as capture:
        console.print(table(points_of(ROWS)))
    first, *_, last = capture.get().splitlines()[2:]
    assert first.split()[:4] == ["5", "1e-05", "2", "+0.500"]
    assert "trial_00002 failed, trial_00005 stopped early at update 3, +0.900" in last


@pytest.mark.parametrize(("stop_on_collapse", "status"), [(True, "collapsed"), (False, "stopped early")])
def test_a_trial_that_a_scheduler_stopped_is_not_whole_because_a_warning_stood(
    stop_on_collapse: bool, status: str
) -> None:
    settings = {"seed": 0, "exchange_period": 5, "lr": 1e-5, "stop_on_collapse": stop_on_collapse}
    trial = Trial("cory", config={"cory_settings": settings}, stub=True)
    trial.set_status(Trial.TERMINATED)
    trial.run_metadata.last_result = {"updates": 3, "combined_reward": 0.5, "cory": {"collapsed": True}}
    (found,) = rows_of([trial], AXES, updates=9)
    assert (found.status, found.updates) == (status, 3)


def test_every_trial_is_in_the_file(tmp_path: Path) -> None:
    write_csv(ROWS, tmp_path / "results.csv")
    lines = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [line["trial"] for line in lines] == [entry.trial for entry in ROWS]
    assert [line["exchange_period"] for line in lines][:3] == ["1", "5", "null"]
    assert (lines[2]["status"], lines[2]["combined_reward"], lines[2]["reason"]) == ("failed", "", "No room, no luck.")


def test_plots_are_drawn_also_where_nothing_succeeded(tmp_path: Path) -> None:
    for name, rows in (("some", ROWS), ("none", [ROWS[2]])):
        for draw in (draw_objective, draw_parallel):
            file = tmp_path / f"{name}-{draw.__name__}.png"
            draw(rows, AXES, file)
            assert file.stat().st_size > 5_000
