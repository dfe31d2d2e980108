from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.table import Table

from launch.experiments.study import load
from launch.experiments.study_runs import jobs
from launch.experiments.tables import arms_table, plan_table, result_line, summary_table
from tests.launch.results_of_studies import figures, study_run


def lines(table: Table, width: int = 160) -> list[list[str]]:
    console = Console(file=StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, StringIO)
    return [line.split() for line in console.file.getvalue().splitlines()]


def test_arms_are_shown_with_what_they_differ_in() -> None:
    study = load("imdb")
    shown = lines(arms_table(study, [study.arms[name] for name in ("cory", "no-exchange", "ppo-lr-1e-3")]))
    assert shown[2:] == [
        ["cory", "5", "1"],
        ["no-exchange", "cory", "exchange_period=null", "5", "1"],
        ["ppo-lr-1e-3", "ppo", "lr=0.001", "3", "2"],
    ]


def test_arms_names_stay_whole_however_much_they_differ_in() -> None:
    study = load("credit")
    shown = lines(arms_table(study, list(study.arms.values())), width=80)
    assert set(study.arms) <= {line[0] for line in shown if line}


def test_what_is_left_takes_as_long_as_the_same_arm_took_or_else_as_all_did(tmp_path: Path) -> None:
    study = load("imdb")
    asked = jobs(study, tmp_path, [study.arms["cory"], study.arms["ppo"]], seeds=(0, 1))
    done = study_run("cory", 0, figures(1.0, 1.0))
    found = {job: done if (job.arm.name, job.seed) == ("cory", 0) else None for job in asked}
    todo = [job for job, run in found.items() if run is None]
    assert lines(plan_table(found, todo))[2:] == [
        ["cory", "1", "1", "1:00"],
        ["ppo", "0", "2", "2:00"],
        ["all", "1", "3", "3:00"],
    ]


def test_the_summary_has_each_arm_s_mean_with_its_interval_and_its_collapses() -> None:
    runs = [study_run("cory", seed, figures(1.0 + seed, 2.0)) for seed in (0, 1, 2)]
    runs += [study_run("ppo", 0, figures(1.0, 60.0), place=1), study_run("ppo", 1, figures(1.0, 2.0), status="failed")]
    cory, ppo = lines(summary_table(runs))[2:]
    assert cory[:5] == ["cory", "3", "+2.00", "±", "2.48"] and cory[-4:] == ["0", "of", "3", "0.2"]
    assert ppo == ["ppo", "1", "+1.00", "60.00", "-5.000", "1", "of", "1", "0.2"]


def test_arms_that_had_the_same_place_in_different_versions_of_a_study_have_a_row_each() -> None:
    runs = [study_run(arm, seed, figures(1.0, 2.0), place=7) for seed in (0, 1) for arm in ("older", "newer")]
    assert [line[:2] for line in map(list, lines(summary_table(runs))[2:])] == [["newer", "2"], ["older", "2"]]


def test_a_run_that_has_just_ended_is_told_with_its_collapse() -> None:
    line = result_line(study_run("ppo", 3, figures(1.0, 60.0)))
    assert line.startswith("ppo                seed 3") and line.endswith("1:00  collapse: kl")
