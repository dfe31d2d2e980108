"""`cory evaluate` end to end, in a separate process: interrupted, repeated, and on a model."""

import json
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from launch.main import main
from policies.generation.installed import vllm_installed
from tests.forked import run_forked
from tests.launch.conftest import ENVIRONMENT
from tests.launch.training.test_training import SMALL

REWARD = """
import os
import signal

def brevity(completions):
    if os.path.exists("calls_left"):
        with open("calls_left", "r+") as file:
            left = int(file.read()) - 1
            file.seek(0)
            file.write(str(left))
        if left == 0:
            os.kill(os.getppid(), signal.SIGTERM)
    return [-float(len(completion)) for completion in completions]
"""
IN_TRAINING = ("--split", "validation")
"""The queries of evaluations during training."""
SHORT = ("task=imdb", "max_response_tokens=12", "backend=transformers", "num_runners=0")
"""Settings for the bundled model."""
ARGUMENTS = (
    "run",
    *IN_TRAINING,
    "--queries",
    "6",
    "--samples",
    "2",
    "--solved-at",
    "-20",
    "--checkpoint",
    "2",
    "--out",
    "out",
)
FEW = (*IN_TRAINING, "--queries", "4", "--samples", "1", "--quiet")
ALONE = ("check_weight_sync=false", "reward=my_rewards:brevity", "--queries", "2", "--samples", "3", "--out", "model")


def scenario() -> None:
    """Trains; is killed in an evaluation, and repeats it; evaluates a model."""
    assert (
        main(
            [
                "train",
                *SMALL,
                "num_updates=2",
                "lr=1e-3",
                "exchange_period=null",
                "validation=false",
                "--quiet",
                "--out",
                "run",
            ]
        )
        == 0
    )
    folder = Path("out")
    Path("calls_left").write_text("5")  # of 9; the last ones use the checkpoint's weights
    assert main(["evaluate", *ARGUMENTS]) == 143
    assert {file.name for file in folder.iterdir()} == {"log.txt", ".lock"}
    assert main(["evaluate", *ARGUMENTS]) == 0
    assert main(["evaluate", *ARGUMENTS, "seed=1"]) == 2  # the folder has results
    assert main(["evaluate", "imdb-gpt2-tiny", *SHORT, *ALONE]) == 0


def model_with_vllm() -> None:
    """Evaluates a model with vLLM."""
    assert main(["evaluate", "imdb-gpt2-tiny", "backend=vllm", *ALONE]) == 0


def untrained() -> None:
    """Evaluates the policies of update 0."""
    assert main(["train", *SMALL, "num_updates=1", "--quiet", "--out", "run"]) == 0
    assert main(["evaluate", "run", "--checkpoint", "0", *FEW]) == 0


def three_agents() -> None:
    """Trains a chain of three adapters and evaluates it."""
    lora = ("weights=lora", "num_agents=3", "observed=last", "num_updates=1", "eval_every=1", "lr=1e-2")
    assert main(["train", *SMALL, *lora, "--quiet", "--out", "run"]) == 0
    assert main(["evaluate", "run", "--checkpoint", "1", *FEW, "--out", "out"]) == 0


def run_scenario(
    scenario: str, folder: Path, module: str = __name__, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Runs a scenario function of a module in a separate process."""
    (folder / "my_rewards.py").write_text(REWARD)
    function = getattr(import_module(module), scenario)
    result = run_forked(function, folder=folder, environment={**ENVIRONMENT, **environment})
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def evaluated(
    tmp_path_factory: pytest.TempPathFactory, cluster: dict[str, str]
) -> tuple[Path, "subprocess.CompletedProcess[str]"]:
    """The folder of the scenario, and its output."""
    folder = tmp_path_factory.mktemp("evaluation")
    return folder, run_scenario("scenario", folder, **cluster)


Evaluated = tuple[Path, "subprocess.CompletedProcess[str]"]


def read_json(file: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def responses(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "responses.jsonl").read_text().splitlines()]


def means(rows: dict[str, Any], name: str) -> dict[str, float]:
    return {figure: estimate["mean"] for figure, estimate in rows[name]["figures"].items()}


def test_an_evaluation_is_repeated_in_the_folder_that_sigterm_left(evaluated: Evaluated) -> None:
    folder, result = evaluated
    record = read_json(folder / "out" / "evaluation.json")
    assert record["command"] == "cory evaluate " + " ".join(ARGUMENTS)
    assert "  9/9 batches" in result.stdout
    assert "\x1b" not in result.stdout and "\r" not in result.stdout


def test_every_policy_is_evaluated_alone_and_as_observer_with_the_base(evaluated: Evaluated) -> None:
    result = read_json(evaluated[0] / "out" / "evaluation.json")
    assert list(result["rows"]) == [
        *("base", "llm_1", "llm_2"),
        *("base after base", "llm_2 after llm_1", "llm_1 after llm_2"),
    ]
    for name, row in result["rows"].items():
        figures = row["figures"]
        assert list(figures)[-2:] == ["pass@1", "pass@2"] and figures["kl"]["n"] == 6
        assert all(estimate["low"] <= estimate["mean"] <= estimate["high"] for estimate in figures.values())
        # Up to rounding. As observer, the base has another prompt than the reference, so its KL is not 0.
        assert (figures["kl"]["high"] < 1e-6) == (name == "base")
        assert figures["pass@1"]["mean"] <= figures["pass@2"]["mean"]
        assert name in evaluated[1].stdout
    assert result["update"] == 2 and result["dropped"] == 0


@pytest.mark.slow
def test_every_policy_of_a_chain_of_three_is_evaluated_in_every_role(tmp_path: Path) -> None:
    run_scenario("three_agents", tmp_path)
    assert_first_samples_match_training(tmp_path)
    folder = tmp_path / "out"
    rows, chains = read_json(folder / "evaluation.json")["rows"], responses(folder)[::4]
    policies = ("base", "llm_1", "llm_2", "llm_3")
    observers = {f"{policy} as observer_{position}" for policy in policies for position in (1, 2)}
    assert set(rows) == {*policies, *observers}
    assert rows["llm_2 as observer_2"]["figures"]["kl"]["mean"] > 0
    assert [chain["policies"] for chain in chains] == [
        ["base", "base", "base"],
        *(["llm_1", "llm_2", "llm_3"], ["llm_2", "llm_3", "llm_1"], ["llm_3", "llm_1", "llm_2"]),
    ]


def test_the_first_samples_match_the_evaluation_during_training(evaluated: Evaluated) -> None:
    assert_first_samples_match_training(evaluated[0])


def assert_first_samples_match_training(folder: Path) -> None:
    """Compares metrics computed in two ways from the same queries, seeds, lengths and weights."""
    last_update = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()][-1]
    assert last_update["evaluation"]["llm_1"]["kl"] > 0
    for policy in ("llm_1", "llm_2"):
        values: dict[str, list[float]] = {"task_reward": [], "kl": [], "response_length": [], "eos_rate": []}
        for chain in responses(folder / "out"):
            pioneer = chain["responses"][0]
            if pioneer["policy"] == policy and pioneer["sample"] == 0 and pioneer["query"] < 4:
                assert pioneer["metrics"]["response_length"] == len(pioneer["tokens"])
                for name, column in values.items():
                    column.append(pioneer["metrics"][name])
        means = {name: sum(column) / 4 for name, column in values.items()}
        assert means == pytest.approx({name: last_update["evaluation"][policy][name] for name in means}, rel=1e-4)


@pytest.mark.slow
def test_untrained_policies_equal_the_base(tmp_path: Path) -> None:
    run_scenario("untrained", tmp_path)
    (file,) = (tmp_path / "run" / "evaluation").glob("update_000000-*/evaluation.json")
    rows = read_json(file)["rows"]
    assert means(rows, "llm_1") == means(rows, "llm_2") == means(rows, "base")
    assert means(rows, "llm_1 after llm_2") == means(rows, "base after base") != means(rows, "base")
    assert "pass@1" not in means(rows, "base")


def test_a_model_has_one_row(evaluated: Evaluated) -> None:
    assert_one_row(evaluated[0])


@pytest.mark.slow
@pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")
def test_a_model_is_evaluated_with_vllm(tmp_path: Path) -> None:
    run_scenario("model_with_vllm", tmp_path)
    assert_one_row(tmp_path)


def assert_one_row(folder: Path) -> None:
    """Checks that only the base was evaluated, with a different seed per sample."""
    result = read_json(folder / "model" / "evaluation.json")
    assert list(result["rows"]) == ["base"] and result["update"] is None
    figures = means(result["rows"], "base")
    assert (
        figures["kl"] == pytest.approx(0, abs=1e-6)
        and figures["task_reward"] < 0
        and 1 < figures["response_length"] <= 12
    )
    texts = {chain["responses"][0]["text"] for chain in responses(folder / "model")}
    assert len(texts) == 6  # each sample has a different seed


def test_results_of_another_evaluation_are_not_overwritten(evaluated: Evaluated) -> None:
    aborted, error = evaluated[1].stderr.strip().splitlines()
    assert aborted == "Aborted."
    assert error == "Error: out is not empty. Empty it, or choose another folder with --out."
