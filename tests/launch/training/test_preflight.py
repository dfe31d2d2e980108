"""Checks before a run's folder is created: models, queries, rewards and backends."""

import json
import re
import shutil
from collections.abc import Callable
from datetime import date
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from cory_env.tokenizer import DEFAULT_TOKENIZER
from launch.console.errors import CommandError
from launch.main import main
from launch.run_folder.run import Run
from launch.training.preflight import check_run_settings
from policies.generation import installed
from policies.models.model_check import ModelError
from tests.cory_env.test_preference import save_chat_model
from tests.launch.conftest import Cory
from tests.paper import make_settings


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the bundled model."""
    return Path(shutil.copytree(DEFAULT_TOKENIZER, tmp_path / "model"))


REPEATS = ((5, "1 or 2"), (8, "2"))


def error_of(**values: Any) -> str:
    """Returns the message with which settings are rejected."""
    with pytest.raises((CommandError, ModelError)) as raised:
        check_run_settings(make_settings({"backend": "transformers", **values}))
    return str(raised.value)


def delete_all(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def delete_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def truncate_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])


def truncate_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (delete_all, "it has no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no weights"),
        (truncate_weights, "model.safetensors are damaged"),
        (truncate_config, "config.json' is not a valid JSON file"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "The tokenizer of"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "The tokenizer of"),
        (delete_tokenizer, "has no tokens"),
    ],
)
def test_an_incomplete_model_is_rejected_with_its_folder(
    model: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(model)
    error = error_of(model=str(model))
    assert message in error and str(model) in error and "\n" not in error


def test_prompt_lengths_of_both_splits_are_checked_and_the_min_length_named(tmp_path: Path) -> None:
    def rows(name: str, *queries: str) -> str:
        (tmp_path / name).write_text("".join(json.dumps({"query": query}) + "\n" for query in queries))
        return str(tmp_path / name)

    short, long = rows("short.jsonl", "One", "Two"), rows("long.jsonl", "One", "Two is " + "very " * 50 + "long")
    settings = {
        "task": "custom",
        "reward": "tests.cory_env.sample_rewards:length",
        "max_prompt_tokens": 32,
        "validation": False,
    }
    for files in ({"data": long, "eval_data": short}, {"data": short, "eval_data": long}):
        error = error_of(**settings, **files)
        assert "1 of 2 queries of" in error and "the first is query 1, 'Two is very" in error
    min_length = int(error.split("Raise max_prompt_tokens to ")[1].split(",")[0])
    check_run_settings(make_settings({**settings, **files, "backend": "transformers", "max_prompt_tokens": min_length}))
    assert f"Raise max_prompt_tokens to {min_length}" in error_of(
        **settings | {"max_prompt_tokens": min_length - 1}, **files
    )


@pytest.mark.parametrize(
    ("size", "repeats"), [(4, None), (10, "2 or 3"), *(pytest.param(*case, marks=pytest.mark.slow) for case in REPEATS)]
)
def test_fewer_training_queries_than_an_update_asks_are_a_warning_of_validate_and_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], size: int, repeats: str | None
) -> None:
    for name, count in (("train.jsonl", 4), ("test.jsonl", 2)):
        (tmp_path / name).write_text("".join(f'{{"query": "{name} {number}"}}\n' for number in range(count)))
    data = (f"data={tmp_path / 'train.jsonl'}", f"eval_data={tmp_path / 'test.jsonl'}", "validation=false")
    sizes = (f"queries_per_update={size}", f"minibatch_size={size}", "num_generations=1", "advantage=gae")
    words = ["custom", *data, *sizes, "reward=tests.cory_env.sample_rewards:length", "backend=transformers"]
    warning = f"Only 4 training queries for queries_per_update={size}, so an update asks each {repeats} times."
    assert main(["validate", *words]) == 0
    assert (warning in capsys.readouterr().out) == (repeats is not None)
    (tmp_path / "run").write_text("")  # so that training ends after the checks
    assert main(["train", f"task={words[0]}", *words[1:], "--out", str(tmp_path / "run")]) == 2
    errors = capsys.readouterr().err
    assert (f"Warning: {warning}" in errors) == (repeats is not None) and "Error: " in errors


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("brevity", "'brevity' is not a function's name"),
        ("no_such_module:f", "Module 'no_such_module' of the reward 'no_such_module:f' not found"),
        ("tests.cory_env.sample_rewards:no_such", "has no function 'no_such'"),
    ],
)
def test_an_unloadable_reward_is_rejected_before_models_are_loaded(reward: str, message: str) -> None:
    assert message in error_of(reward=reward)


def test_unloadable_feedback_and_missing_columns_of_it_are_rejected_before_models_are_loaded() -> None:
    stopping = {"reward": "tests.policies.sample_rewards:letters", "stop_when": "solved", "stop_in_training": True}
    error = error_of(**stopping, feedback="tests.policies.sample_rewards:nowhere")
    assert "of the feedback 'tests.policies.sample_rewards:nowhere'" in error or "has no function 'nowhere'" in error
    error = error_of(**stopping, feedback="tests.policies.sample_rewards:has_letter")
    assert "have no value in the column 'letter'" in error and "or the feedback" in error


def test_a_missing_lora_target_is_rejected_with_the_available_layers() -> None:
    error = error_of(weights="lora", lora_target_modules="c_attn,q_proj")
    assert "has no linear layer 'q_proj' to adapt. It has c_attn, c_fc, c_proj; set lora_target_modules" in error


def test_a_reward_with_completion_ids_is_rejected_for_different_tokenizers() -> None:
    mixed = {"task": "drafts", "model": ["drafts-llama-tiny", "imdb-gpt2-tiny"], "max_prompt_tokens": 48}
    error = error_of(**mixed, reward="tests.cory_env.sample_rewards:trl_token_lengths")
    assert "requires completion_ids, but the models drafts-llama-tiny, imdb-gpt2-tiny" in error


def test_a_missing_reward_column_is_rejected_before_models_are_loaded(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"query": "One"}\n{"query": "Two"}\n{"query": "Three"}\n')
    settings = {"task": "custom", "data": str(tmp_path / "rows.jsonl")}
    error = error_of(**settings, reward="tests.cory_env.sample_rewards:with_column")
    assert "2 of 2 queries of train have no value in the column 'answer', which the reward" in error
    check_run_settings(
        make_settings({**settings, "backend": "transformers", "reward": "tests.cory_env.sample_rewards:with_default"})
    )


def test_the_vllm_backend_without_vllm_is_rejected_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(installed, "version", missing)
    assert "pip install 'cory-rllib[vllm]'" in error_of(backend="vllm")
    check_run_settings(make_settings({"backend": "transformers"}))


def test_validate_says_which_max_prompt_tokens_would_suffice(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["task=arithmetic?digits=1&operations=sums", "model=imdb-gpt2-tiny", "max_response_tokens=40"]
    assert main(["validate", *words, "max_prompt_tokens=64"]) == 0
    printed = capsys.readouterr().out
    assert (
        "46 of 46 gold answers score 1.0" in printed and "leave too little room for full-length references" in printed
    )
    required = max(map(int, re.findall(r"Set max_prompt_tokens to (\d+)", printed)))
    for enough in ([f"max_prompt_tokens={required}"], []):  # the default is as long as the data need
        assert main(["validate", *words, *enough]) == 0
        printed = capsys.readouterr().out
        assert f"max_prompt_tokens={required} " in printed and "too little" not in printed


def test_validate_shows_the_prompts_of_a_settings_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text('task: arithmetic?digits=1\nprompt: "Work out {query} ="\nmax_response_tokens: 40\n')
    assert main(["validate", "-c", str(mine), "chat=false"]) == 0
    assert "Work out " in capsys.readouterr().out
    for words, message in (
        (["chat=false"], "Name a preset or a file of settings, such as imdb-tiny or mine.yaml, or set task or env."),
        (["imdb", "gsm8k"], "One preset or file: imdb and gsm8k cannot be combined."),
        (["-c", str(tmp_path / "none.yaml")], "none.yaml cannot be read"),
    ):
        assert main(["validate", *words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_summarize_preset_validates_and_trains_on_a_file(
    cory: Cory, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    texts = ["The film is long. I liked it, and so did my aunt.", "It rained all day, and the match was called off."]
    rows = [{"query": text, "summary": text.split(".")[0]} for text in texts * 4]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chatty = AutoTokenizer.from_pretrained(model)
    chatty.chat_template = "{{ strftime_now('%Y') }} {% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    chatty.save_pretrained(model)
    data = f"data={tmp_path / 'texts.jsonl'}"
    assert (
        main(["validate", "summarize", data, f"model={model}", "max_prompt_tokens=96", "max_response_tokens=12"]) == 0
    )
    assert "Another summary:" in capsys.readouterr().out

    small = (
        "backend=transformers",
        "num_runners=0",
        "check_weight_sync=false",
        "weights=full",
        "max_prompt_tokens=96",
        "num_epochs=1",
    )
    sizes = (
        "max_response_tokens=12",
        "num_updates=1",
        "queries_per_update=4",
        "minibatch_size=4",
        "eval_queries=2",
        "eval_every=1",
    )
    result = cory("train", "summarize", data, f"model={model}", *small, *sizes, "--out", "run")
    assert result.returncode == 0, result.stderr
    assert Run(tmp_path / "run").settings.chat_date == date.today().isoformat()
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert all(0 <= line["policy"][policy]["task_reward"] <= 1 for policy in ("llm_1", "llm_2"))


def test_the_dialogue_preset_validates_with_a_custom_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    rows: list[dict[str, object]] = [
        {"query": "Name a fruit."},
        {"query": [*talk, {"role": "user", "content": "Why is the sky blue?"}]},
    ]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 2))
    judge = save_chat_model(tmp_path / "judge")
    reward = f"reward=cory_env.rewards.preference:score?model={judge}"
    words = [
        f"data={tmp_path / 'talks.jsonl'}",
        f"model={judge}",
        reward,
        "max_prompt_tokens=96",
        "max_response_tokens=12",
    ]
    assert main(["validate", "dialogue", *words]) == 0
    assert "Another assistant answered:" in capsys.readouterr().out


def test_settings_of_another_task_are_rejected() -> None:
    assert "Unknown option 'operations' in task=imdb?operations=sums" in error_of(task="imdb?operations=sums")
