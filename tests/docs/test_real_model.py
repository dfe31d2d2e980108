"""The files of the page "A real model learns" are valid, and their rewards are what the page says."""

import importlib.util
from pathlib import Path

import pytest

from launch.console.configuration import split_arguments
from launch.training import preflight

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "real-model"
PAGE = (FOLDER.parents[1] / "lab" / "real-model.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("task", ["words", "reviews"])
def test_its_files_are_valid_and_held_out_rows_share_nothing_with_training(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(FOLDER)
    model = str(FOLDER.parents[2] / "cory_env" / "assets" / "imdb-gpt2-tiny")  # the page's is an optional package
    words = [f"{task}.yaml", f"model={model}", "chat=false", "max_prompt_tokens=100", "max_response_tokens=100"]
    loaded, _ = preflight.check_run_settings(preflight.fill_in_settings(split_arguments(words).settings()))
    assert len(loaded.train) == 400 and len(loaded.queries("validation")) + len(loaded.test) == 160
    assert not {query.text for query in loaded.train} & {query.text for query in loaded.test}
    assert (FOLDER / f"{task}.yaml").read_text() in PAGE


def test_its_rewards_pay_the_wanted_answer_and_not_an_empty_one() -> None:
    spec = importlib.util.spec_from_file_location("real_model_rewards", FOLDER / "my_rewards.py")
    assert spec is not None and spec.loader is not None
    rewards = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rewards)
    sentences = ["A river, a candle.", "The river", "", " ".join(["river candle"] * 10)]
    words = {"first": ["river"] * 4, "second": ["candle"] * 4}
    assert rewards.both_words(sentences, **words) == pytest.approx([1, 0.5, 0, 0.95])
    answers = ["Positive.", "It is positive", "positive or negative", "", "negative"]
    assert rewards.right_label(answers, ["positive"] * 5) == pytest.approx([1, 0.96, -0.04, 0, 0])
    assert all(line in PAGE for line in (FOLDER / "my_rewards.py").read_text().splitlines() if "def " in line)
