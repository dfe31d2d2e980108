"""`cory compare` on recorded runs."""

import json
from pathlib import Path

import numpy as np
import pytest

from launch.display.statistics import mean_ci
from launch.main import main
from launch.run_folder import final
from launch.run_folder.final import FinalEvaluation
from launch.run_folder.records import EvaluatedResponse
from policies.learning.metrics import RESPONSE_METRICS
from tests.launch.conftest import record_test_run
from tests.paper import paper_settings

REWARDS = {"llm_1": [0.0, 1.0, 2.0, 5.0], "llm_2": [1.0, 1.0, 4.0, 3.0]}


def responses(rewards: list[float], queries: list[int]) -> list[EvaluatedResponse]:
    return [
        EvaluatedResponse(
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
    """A finished run with recorded final responses, and an unfinished run."""
    finished = record_test_run(tmp_path / "finished", paper_settings(num_updates=12))
    policy = {name: responses(rewards, [3, 4, 5, 6]) for name, rewards in REWARDS.items()}
    last = {"llm_1,llm_2": responses([2.0, 4.0], [3, 4]), "llm_2,llm_1": responses([6.0, 1.0], [4, 9])}
    for response in last["llm_2,llm_1"]:  # the other order is as in files of earlier versions
        response["metrics"] = {**response["metrics"], "bare_kl": response["metrics"]["kl"], "in_chain_kl": 99.0}
        del response["metrics"]["kl"]
    final.write_final(finished.final, FinalEvaluation(update=12, policy=policy, last_response=last))
    unfinished = record_test_run(
        tmp_path / "unfinished", paper_settings(num_updates=12, lr=3e-5, num_agents=1), updates=range(4)
    )
    for run in (finished, unfinished):
        run.unlock()
    return [str(finished.path), str(unfinished.path)]


def test_compare_prints_differing_settings_final_metrics_with_intervals_and_costs(
    runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *runs]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["setting", "finished", "unfinished"] in rows
    assert ["lr", "1.41e-05", "3e-05"] in rows and ["num_agents", "2", "1"] in rows
    assert not [row for row in rows if row[:1] == ["num_updates"]]
    mean = mean_ci(np.mean(list(REWARDS.values()), axis=0), "bootstrap")
    assert f"finished mean 12 {mean.format('{:+.2f}')}" in [" ".join(row[: 6 if len(row) > 5 else 0]) for row in rows]
    assert ["unfinished", "llm_1", "0", "+0.00", "0.00", "+0.000"] in rows  # its last evaluation, which has no interval
    assert ["finished", "done", "12/12", "36,000", "24"] in rows and [
        "unfinished",
        "unfinished",
        "3/12",
        "9,000",
        "6",
    ] in rows


def test_json_output_contains_every_metric(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *runs, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["settings"] == {"num_agents": [2, 1], "lr": [1.41e-5, 3e-5]}
    finished, unfinished = output["runs"]
    assert list(finished["held_out"]) == ["mean", "llm_1", "llm_2", "last answer"]
    assert finished["held_out"]["llm_1"]["kl"]["mean"] == 2 and finished["held_out"]["llm_1"]["kl"]["n"] == 4
    assert finished["held_out"]["last answer"]["kl"]["mean"] == 5  # of the query with responses in both orders
    assert finished["held_out"]["mean"]["kl"]["low"] < 2.125 < finished["held_out"]["mean"]["kl"]["high"]
    assert (unfinished["held_out_at"], unfinished["held_out"]["llm_1"]["kl"]["low"], unfinished["tokens"]) == (
        0,
        None,
        9000,
    )


def test_a_run_that_continued_after_its_final_responses_shows_its_last_evaluation(
    runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with (Path(runs[0]) / "metrics.jsonl").open("a") as file:
        file.write('{"update": 13}\n')
    assert main(["compare", *runs, "--json"]) == 0
    (finished, _) = json.loads(capsys.readouterr().out)["runs"]
    assert (finished["update"], finished["held_out_at"], finished["held_out"]["mean"]["kl"]["low"]) == (13, 12, None)


def test_comparing_a_run_with_itself_is_rejected(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", runs[0], runs[0]]) == 2
    assert capsys.readouterr().err == "Error: Name at least two different runs.\n"
