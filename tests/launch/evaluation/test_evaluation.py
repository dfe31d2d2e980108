"""`cory evaluate` end to end, in a process of its own: interrupted, continued, and on a model alone."""

import json
import shutil
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from launch.main import main
from policies.generation.installed import vllm_installed
from tests.forked import forked
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
"""The queries that an evaluation in training asks."""
ASKED = (
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
    "found",
)
FEW = (*IN_TRAINING, "--queries", "4", "--samples", "1", "--quiet")
ALONE = ("check_weight_sync=false", "reward=my_rewards:brevity", "--queries", "2", "--samples", "3", "--out", "model")


def scenario() -> None:
    """Trains, evaluates again and again, and keeps each `evaluation.json`."""
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
    found = Path("found")
    Path("calls_left").write_text("5")  # of 9: the last of them under the checkpoint's weights
    assert main(["evaluate", *ASKED]) == 143
    with (found / "responses.jsonl").open("a") as file:
        file.write('{"batch": 4, "torn')
    assert main(["evaluate", *ASKED]) == 0
    (found / "evaluation.json").rename("continued.json")
    assert main(["evaluate", *ASKED]) == 0  # nothing is left to play
    (found / "evaluation.json").rename("again.json")
    shutil.rmtree(found)
    assert main(["evaluate", *ASKED, "--quiet"]) == 0
    assert main(["evaluate", *ASKED, "seed=1"]) == 2  # another evaluation is there
    assert main(["evaluate", "imdb-gpt2-tiny", "backend=transformers", "num_runners=0", *ALONE]) == 0


def with_vllm() -> None:
    """Evaluates a model alone, by vLLM's engine."""
    assert main(["evaluate", "imdb-gpt2-tiny", "backend=vllm", *ALONE]) == 0


def untrained() -> None:
    """Evaluates policies before their first update."""
    assert main(["train", *SMALL, "num_updates=1", "--quiet", "--out", "run"]) == 0
    assert main(["evaluate", "run", "--checkpoint", "0", *FEW]) == 0


def of_three() -> None:
    """Trains a chain of three adapters and evaluates it."""
    lora = ("weights=lora", "num_agents=3", "observed=best", "num_updates=1", "eval_every=1", "lr=1e-2")
    assert main(["train", *SMALL, *lora, "--quiet", "--out", "run"]) == 0
    assert main(["evaluate", "run", "--checkpoint", "1", *FEW, "--out", "found"]) == 0


def play(scenario: str, folder: Path, of: str = __name__, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Plays a scenario of a module, this one or another, in a process of its own."""
    (folder / "my_rewards.py").write_text(REWARD)
    function = getattr(import_module(of), scenario)
    result = forked(function, folder=folder, environment={**ENVIRONMENT, **environment})
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def scene(
    tmp_path_factory: pytest.TempPathFactory, cluster: dict[str, str]
) -> tuple[Path, "subprocess.CompletedProcess[str]"]:
    """The folder of the scenario, and what it printed."""
    folder = tmp_path_factory.mktemp("evaluation")
    return folder, play("scenario", folder, **cluster)


Scene = tuple[Path, "subprocess.CompletedProcess[str]"]


def read(file: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def responses(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "responses.jsonl").read_text().splitlines()[1:]]


def means(rows: dict[str, Any], name: str) -> dict[str, float]:
    return {figure: estimate["mean"] for figure, estimate in rows[name]["figures"].items()}


def test_an_evaluation_stopped_by_sigterm_goes_on_and_gives_what_an_unbroken_one_gives(scene: Scene) -> None:
    folder, result = scene
    assert "4 of 9 batches are saved in found/responses.jsonl. Repeat the command to continue." in result.stdout
    assert "(4 of 9 batches done)" in result.stdout
    continued, unbroken = read(folder / "continued.json"), read(folder / "found" / "evaluation.json")
    assert continued == read(folder / "again.json")
    assert continued.pop("command") == "cory evaluate " + " ".join(ASKED)
    assert unbroken.pop("command") == "cory evaluate " + " ".join((*ASKED, "--quiet"))
    assert continued == unbroken
    assert "\x1b" not in result.stdout and "\r" not in result.stdout


def test_every_policy_is_there_alone_and_as_observer_beside_the_base(scene: Scene) -> None:
    found = read(scene[0] / "continued.json")
    assert list(found["rows"]) == [
        *("base", "llm_1", "llm_2"),
        *("base after base", "llm_2 after llm_1", "llm_1 after llm_2"),
    ]
    for name, row in found["rows"].items():
        figures = row["figures"]
        assert list(figures)[-2:] == ["pass@1", "pass@2"] and figures["kl"]["n"] == 6
        assert all(each["low"] <= each["mean"] <= each["high"] for each in figures.values())
        # Up to rounding; the base's last answer is to another prompt than the base is asked that it is compared with.
        assert (figures["kl"]["high"] < 1e-6) == (name == "base")
        assert figures["pass@1"]["mean"] <= figures["pass@2"]["mean"]
        assert name in scene[1].stdout
    assert found["checkpoint"]["update"] == 2 and found["dropped"] == 0


@pytest.mark.slow
def test_of_a_chain_of_three_every_policy_is_there_in_every_role(tmp_path: Path) -> None:
    play("of_three", tmp_path)
    assert_first_samples_are_those_of_training(tmp_path)
    folder = tmp_path / "found"
    rows, chains = read(folder / "evaluation.json")["rows"], [line["chains"][0] for line in responses(folder)]
    policies = ("base", "llm_1", "llm_2", "llm_3")
    later = {f"{policy} as observer_{place}" for policy in policies for place in (1, 2)}
    assert set(rows) == {*policies, *later}
    assert rows["llm_2 as observer_2"]["figures"]["kl"]["mean"] > 0
    assert [[response["policy"] for response in chain] for chain in chains] == [
        ["base", "base", "base"],
        *(["llm_1", "llm_2", "llm_3"], ["llm_2", "llm_3", "llm_1"], ["llm_3", "llm_1", "llm_2"]),
    ]


def test_the_first_samples_are_those_of_the_held_out_evaluation_in_training(scene: Scene) -> None:
    assert_first_samples_are_those_of_training(scene[0])


def assert_first_samples_are_those_of_training(folder: Path) -> None:
    """Same queries, seeds, lengths and weights: the figures of two ways to compute them meet."""
    trained = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()][-1]
    assert trained["evaluation"]["llm_1"]["kl"] > 0
    for module in ("llm_1", "llm_2"):
        values: dict[str, list[float]] = {"task_reward": [], "kl": [], "response_length": [], "eos_rate": []}
        for line in responses(folder / "found"):
            for chain in line["chains"]:
                pioneer = chain[0]
                if pioneer["policy"] == module and pioneer["sample"] == 0 and pioneer["query"] < 4:
                    assert pioneer["metrics"]["response_length"] == len(pioneer["tokens"])
                    for name, column in values.items():
                        column.append(pioneer["metrics"][name])
        found = {name: sum(column) / 4 for name, column in values.items()}
        assert found == pytest.approx({name: trained["evaluation"][module][name] for name in found}, rel=1e-4)


@pytest.mark.slow
def test_policies_that_were_not_trained_yet_are_the_base(tmp_path: Path) -> None:
    play("untrained", tmp_path)
    (file,) = (tmp_path / "run" / "evaluation").glob("update_000000-*/evaluation.json")
    rows = read(file)["rows"]
    assert means(rows, "llm_1") == means(rows, "llm_2") == means(rows, "base")
    assert means(rows, "llm_1 after llm_2") == means(rows, "base after base") != means(rows, "base")
    assert "pass@1" not in means(rows, "base")


def test_a_model_alone_has_one_row(scene: Scene) -> None:
    assert_one_row(scene[0])


@pytest.mark.slow
@pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")
def test_a_model_alone_answers_by_vllm_too(tmp_path: Path) -> None:
    play("with_vllm", tmp_path)
    assert_one_row(tmp_path)


def assert_one_row(folder: Path) -> None:
    """The base alone, as itself, with a seed per sample."""
    found = read(folder / "model" / "evaluation.json")
    assert list(found["rows"]) == ["base"] and found["checkpoint"] is None
    figures = means(found["rows"], "base")
    assert (
        figures["kl"] == pytest.approx(0, abs=1e-6)
        and figures["task_reward"] < 0
        and 1 < figures["response_length"] <= 12
    )
    texts = {chain[0]["text"] for line in responses(folder / "model") for chain in line["chains"]}
    assert len(texts) == 6  # each sample has a seed of its own


def test_a_folder_of_another_evaluation_is_refused_with_what_differs(scene: Scene) -> None:
    assert (
        "Error: found/responses.jsonl contains other work: different seed. Choose another location" in scene[1].stderr
    )
    assert len(scene[1].stderr.strip().splitlines()) == 2  # after "Aborted."
