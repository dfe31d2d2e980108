"""Runs whose chains stop, end to end: training, resuming, evaluation and tables with missing values."""

import json
from pathlib import Path
from typing import Any

import pytest

from launch.display.comparison import ComparedRun
from launch.display.texts import chain_text
from launch.experiments.results import final_figures
from launch.main import main
from launch.run_folder.final import read_final
from launch.run_folder.run import Run
from launch.training.tracking import flat_metrics
from tests.forked import run_forked
from tests.launch.conftest import ENVIRONMENT, Cory

SETTINGS = (
    "imdb-tiny",
    *("backend=transformers", "num_runners=0", "queries_per_update=4", "num_generations=2", "minibatch_size=4"),
    *("num_epochs=1", "lr=1e-3", "eval_queries=4", "eval_every=1", "max_response_tokens=6"),
    *("check_weight_sync=false", "reward=tests.policies.sample_rewards:letters", "test_queries=8"),
    *("stop_when=solved", "stop_in_training=true"),
)
SOLVED = ("feedback=tests.policies.sample_rewards:always_solved", "exchange_period=1", "average_period=null")
MIXED = ("feedback=tests.policies.sample_rewards:long_enough", "num_policies=1")


def scenario() -> None:
    """Trains two runs, resumes one of them, and evaluates the other."""
    assert main(["train", *SETTINGS, *SOLVED, "num_updates=2", "--quiet", "--out", "solved"]) == 0
    assert main(["train", "--resume", "solved", "num_updates=3", "--quiet"]) == 0
    assert main(["train", *SETTINGS, *MIXED, "num_updates=1", "--out", "mixed"]) == 0
    assert main(["evaluate", "mixed", "--checkpoint", "1", "--queries", "6", "--samples", "2", "--out", "out"]) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, cluster: dict[str, str]) -> Path:
    """The folder of the scenario, with its output."""
    path = tmp_path_factory.mktemp("stopped")
    result = run_forked(scenario, folder=path, environment={**ENVIRONMENT, **cluster})
    assert result.returncode == 0, result.stderr
    (path / "output.txt").write_text(result.stdout)
    return path


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_a_policy_without_responses_has_null_metrics_and_gaps_in_trackers(folder: Path) -> None:
    lines = read_lines(folder / "solved" / "metrics.jsonl")[1:]
    assert [line["roles"]["pioneer"] for line in lines] == ["llm_1", "llm_2", "llm_1"]
    for line in lines:
        pioneer, observer = line["roles"]["pioneer"], line["roles"]["observer"]
        assert line["policy"][pioneer]["task_reward"] is not None and line["role"]["pioneer"]["kl"] is not None
        assert set(line["policy"][observer].values()) == set(line["role"]["observer"].values()) == {None}
        metrics = flat_metrics(line)  # type: ignore[arg-type]
        assert f"policy/{pioneer}/kl" in metrics and not any(name.startswith(f"policy/{observer}/") for name in metrics)
        assert metrics[f"position/{observer}"] == 1.0
        assert None not in line["last_response"].values() and None not in line["evaluation"]["mean"].values()


@pytest.mark.slow
def test_tables_and_plots_show_runs_with_missing_values(folder: Path, cory_in_process: Cory) -> None:
    runs = [str(folder / name) for name in ("solved", "mixed")]
    for words in ([*runs, "--out", "both.png"], [runs[0], "--out", "a.png"]):
        result = cory_in_process("plot", *words)
        assert result.returncode == 0, result.stderr
    assert cory_in_process("runs", str(folder)).stdout.count("ended") == 2


@pytest.mark.slow
def test_final_results_have_the_tokens_of_the_chain(folder: Path) -> None:
    final = read_final(folder / "mixed" / "final.json")
    assert final is not None
    (last,) = final["last_response"].values()
    pioneers = {response["query"]: response for response in final["policy"]["llm_1"]}
    assert {response["role"] for response in last} == {"pioneer", "observer"} and len(last) == len(pioneers) == 8
    for response in last:
        own = len(response["tokens"])
        before = 0 if response["role"] == "pioneer" else len(pioneers[response["query"]]["tokens"])
        assert response["metrics"]["chain_tokens"] == own + before
    figures = final_figures(final, ("llm_1",))
    for name in ("task_reward", "bare_kl", "in_chain_kl", "chain_tokens"):
        values = [response["metrics"][name] for response in last]
        assert figures["last_response"][name] == pytest.approx(sum(map(float, values)) / 8, rel=1e-3)  # type: ignore[arg-type]
    values = ComparedRun.read(Run(folder / "mixed"), "mixed").values["last answer"]
    assert values["task_reward"].mean() == pytest.approx(figures["last_response"]["task_reward"], rel=1e-3)


@pytest.mark.slow
def test_an_evaluation_has_the_last_answers_and_every_chain_counts_once(folder: Path) -> None:
    record = json.loads((folder / "out" / "evaluation.json").read_text())
    chains = [chain for line in read_lines(folder / "out" / "responses.jsonl")[1:] for chain in line["chains"]]
    trained = [chain for chain in chains if chain[0]["policy"] == "llm_1"]
    assert {len(chain) for chain in trained} == {1, 2} and len(trained) == 12
    assert list(record["rows"]) == [
        *("base", "llm_1", "base after base", "llm_1 after llm_1", "base then base", "llm_1 then llm_1")
    ]
    assert record["settings"]["stop_when"] == "solved"

    def mean(label: str, name: str) -> float:
        return float(record["rows"][label]["figures"][name]["mean"])

    rewards = [chain[-1]["metrics"]["task_reward"] for chain in trained]  # two samples of each query
    assert mean("llm_1 then llm_1", "task_reward") == pytest.approx(sum(rewards) / 12)
    tokens = [sum(len(response["tokens"]) for response in chain) for chain in trained]
    assert mean("llm_1 then llm_1", "chain_tokens") == pytest.approx(sum(tokens) / 12)
    by_query: dict[int, list[float]] = {}
    for chain in trained:
        for response in chain[1:]:
            by_query.setdefault(response["query"], []).append(response["metrics"]["task_reward"])
    expected = sum(sum(values) / len(values) for values in by_query.values()) / len(by_query)
    assert mean("llm_1 after llm_1", "task_reward") == pytest.approx(expected)
    output = (folder / "output.txt").read_text()
    assert "last answer" in output and "tokens per query" in output


@pytest.mark.slow
def test_samples_show_the_feedback_between_the_responses(folder: Path) -> None:
    for sample in read_lines(folder / "mixed" / "samples.jsonl"):
        lines = chain_text(sample, 2).plain.splitlines()[1:]  # type: ignore[arg-type]
        expected = []
        for response in sample["responses"]:
            expected.append(response["role"])
            expected += ["feedback"] * ("feedback" in response)
        assert [line.split()[0] for line in lines] == expected
    assert "feedback   " in (folder / "output.txt").read_text()
    long = {"role": "pioneer", "policy": "llm_1", "text": "a", "task_reward": 1.0, "feedback": "word \n" * 100}
    (_, _, line) = chain_text({"query": "q", "responses": [long]}, 0).plain.splitlines()  # type: ignore[list-item]
    assert line.startswith("feedback   word word") and line.endswith(" …") and len(line) < 120
