"""`cory compare` on recorded runs."""

import json
from pathlib import Path

import numpy as np
import pytest

from launch.display.statistics import mean_ci
from launch.main import main
from launch.run_folder import final
from launch.run_folder.final import Final
from launch.run_folder.records import Evaluation
from policies.learning.metrics import RESPONSE_METRICS
from policies.settings.settings import Settings
from tests.launch.conftest import record

REWARDS = {"llm_1": [0.0, 1.0, 2.0, 5.0], "llm_2": [1.0, 1.0, 4.0, 3.0]}


def responses(rewards: list[float], queries: list[int]) -> list[Evaluation]:
    return [
        Evaluation(
            policy="",
            role="",
            query=query,
            sample=0,
            prompt="",
            text="",
            tokens=[],
            metrics=dict.fromkeys(RESPONSE_METRICS, reward),
        )
        for query, reward in zip(queries, rewards, strict=True)
    ]


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """One that kept every response after training, and one that did not get far."""
    whole = record(tmp_path / "whole", Settings(num_updates=12))
    policy = {name: responses(rewards, [3, 4, 5, 6]) for name, rewards in REWARDS.items()}
    last = {"llm_1,llm_2": responses([2.0, 4.0], [3, 4]), "llm_2,llm_1": responses([6.0, 1.0], [4, 9])}
    final.write(whole.final, Final(update=12, policy=policy, last_response=last))
    part = record(tmp_path / "part", Settings(num_updates=12, lr=3e-5, num_agents=1), updates=range(4))
    for run in (whole, part):
        run.unlock()
    return [str(whole.path), str(part.path)]


def test_it_tells_what_differs_how_runs_ended_with_intervals_where_known_and_what_they_took(
    runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *runs]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["setting", "whole", "part"] in rows
    assert ["lr", "1.41e-05", "3e-05"] in rows and ["num_agents", "2", "1"] in rows
    assert not [row for row in rows if row[:1] == ["num_updates"]]
    mean = mean_ci(np.mean(list(REWARDS.values()), axis=0), "bootstrap")
    assert f"whole mean 12 {mean.shown('{:+.2f}')}" in [" ".join(row[: 6 if len(row) > 5 else 0]) for row in rows]
    assert ["part", "llm_1", "0", "+0.00", "0.00", "+0.000"] in rows  # its last evaluation, which has no interval
    assert ["whole", "done", "12/12", "36,000", "24"] in rows and ["part", "unfinished", "3/12", "9,000", "6"] in rows


def test_a_program_is_told_every_figure(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *runs, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["settings"] == {"num_agents": [2, 1], "lr": [1.41e-5, 3e-5]}
    whole, part = told["runs"]
    assert list(whole["held_out"]) == ["mean", "llm_1", "llm_2", "last answer"]
    assert whole["held_out"]["llm_1"]["kl"]["mean"] == 2 and whole["held_out"]["llm_1"]["kl"]["n"] == 4
    assert whole["held_out"]["last answer"]["kl"]["mean"] == 5  # of the query that both orders answered
    assert whole["held_out"]["mean"]["kl"]["low"] < 2.125 < whole["held_out"]["mean"]["kl"]["high"]
    assert (part["held_out_at"], part["held_out"]["llm_1"]["kl"]["low"], part["tokens"]) == (0, None, 9000)


def test_a_run_that_went_on_after_its_last_look_is_shown_by_its_last_evaluation(
    runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with (Path(runs[0]) / "metrics.jsonl").open("a") as file:
        file.write('{"update": 13}\n')
    assert main(["compare", *runs, "--json"]) == 0
    (whole, _) = json.loads(capsys.readouterr().out)["runs"]
    assert (whole["update"], whole["held_out_at"], whole["held_out"]["mean"]["kl"]["low"]) == (13, 12, None)


def test_one_run_alone_cannot_be_compared(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", runs[0], runs[0]]) == 2
    assert capsys.readouterr().err == "Error: Name at least two different runs.\n"
