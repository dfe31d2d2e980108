from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.table import Table

from launch.commands.study import _arms_table, _result_line, _summary_table
from launch.experiments.study import load_study
from launch.experiments.study_runs import list_jobs
from tests.launch.results_of_studies import policy_metrics, study_run, write_runs


def lines(table: Table, width: int = 160) -> list[list[str]]:
    console = Console(file=StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, StringIO)
    return [line.split() for line in console.file.getvalue().splitlines()]


def test_arms_are_listed_with_their_differences_and_finished_runs(tmp_path: Path) -> None:
    study = load_study("imdb")
    write_runs(tmp_path, study_run("cory", 1, policy_metrics(1.0, 1.0)))
    jobs = list_jobs(study, tmp_path, [study.arms[name] for name in ("cory", "no-exchange", "ppo-lr-1e-3")])
    assert lines(_arms_table(study, jobs))[2:] == [
        ["cory", "1", "1", "of", "5"],
        ["no-exchange", "cory", "exchange_period=null", "1", "0", "of", "5"],
        ["ppo-lr-1e-3", "ppo", "lr=0.001", "2", "0", "of", "3"],
    ]
    credit = load_study("credit")
    rows = lines(_arms_table(credit, list_jobs(credit, tmp_path, list(credit.arms.values()))), width=80)
    assert set(credit.arms) <= {line[0] for line in rows if line}  # names are not wrapped


def test_the_summary_shows_means_with_intervals_and_collapses_per_arm() -> None:
    runs = [study_run("cory", seed, policy_metrics(1.0 + seed, 2.0)) for seed in (0, 1, 2)]
    runs += [
        study_run("ppo", 0, policy_metrics(1.0, 60.0), arm_index=1),
        study_run("ppo", 1, policy_metrics(1.0, 2.0), status="diverged", arm_index=1),
    ]
    cory, ppo = lines(_summary_table(runs))[2:]
    assert cory == ["cory", "3", "+2.00", "±", "2.48", "2.00", "±", "0.00", "+1.800", "±", "2.484", "0.2"]
    expected = "ppo 2 +1.00, 1 of 2 60.00, 1 of 2 -5.000, 1 of 2 0.2 seed 0 collapsed: kl, seed 1 diverged, ended early"
    assert " ".join(ppo) == expected


def test_arms_with_the_same_index_in_different_versions_of_a_study_have_separate_rows() -> None:
    runs = [
        study_run(arm, seed, policy_metrics(1.0, 2.0), arm_index=7) for seed in (0, 1) for arm in ("older", "newer")
    ]
    assert [line[:2] for line in lines(_summary_table(runs))[2:]] == [["newer", "2"], ["older", "2"]]


def test_the_result_line_of_a_run_shows_its_collapse() -> None:
    line = _result_line(study_run("ppo", 3, policy_metrics(1.0, 60.0)))
    assert line.startswith("ppo                seed 3") and line.endswith("seed 3 collapsed: kl")
