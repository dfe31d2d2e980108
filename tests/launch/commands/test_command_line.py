"""The `cory` command in an empty folder: output, errors and exit codes."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from launch.console.cli import COMMANDS
from policies.settings.files import presets
from tests.launch.conftest import ENVIRONMENT, Cory

Refusal = Callable[..., str]


def error_sentence(result: "subprocess.CompletedProcess[str]") -> str:
    """Checks that a command failed with a one-sentence error, and returns that sentence."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) in ((3, 4) if lines[0].startswith("Usage: ") else (1,))
    return lines[-1]


@pytest.fixture
def refusal(cory_in_process: Cory, tmp_path: Path) -> Refusal:
    """Runs `cory ...` in a folder, checks that it fails without changing the folder, and returns the error."""

    def run(*words: str) -> str:
        before = list(tmp_path.iterdir())
        message = error_sentence(cory_in_process(*words))
        assert list(tmp_path.iterdir()) == before
        return message

    return run


def test_help_lists_every_command_without_importing_heavy_libraries() -> None:
    script = (
        "import sys, launch.main\nlaunch.main.main(['--help'])\n"
        "assert not {'torch', 'ray', 'transformers', 'pydantic'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert all(f"  {command} " in result.stdout for command in COMMANDS)


def test_settings_are_read_without_importing_heavy_libraries() -> None:
    script = (
        "import sys, launch.main\nassert launch.main.main(['train', '--print-config']) == 0\n"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, stdout=subprocess.DEVNULL, check=True)


@pytest.mark.parametrize("words", [["train", "--print-config"], ["--help"]])
@pytest.mark.parametrize("buffering", ["", "1"])
def test_a_closed_output_pipe_ends_a_command_silently(words: list[str], buffering: str) -> None:
    command = [sys.executable, "-m", "cory_rllib", *words]
    environment = {**ENVIRONMENT, "PYTHONUNBUFFERED": buffering}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.communicate()[1] == ""
    assert process.returncode == 141


def test_output_that_is_not_open_for_writing_is_an_error() -> None:
    command = [sys.executable, "-m", "cory_rllib", "--help"]
    with open(os.devnull) as stdout:
        result = subprocess.run(command, env=ENVIRONMENT, stdout=stdout, stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr) == (2, "Error: The output cannot be written: Bad file descriptor.\n")


def test_an_unknown_command_is_rejected_with_a_suggestion(refusal: Refusal) -> None:
    assert "Did you mean 'train'?" in refusal("trian")


def test_an_unknown_option_is_rejected(refusal: Refusal) -> None:
    assert "--outt" in refusal("train", "--outt", "x")


def test_a_negative_number_of_failures_is_rejected(refusal: Refusal) -> None:
    assert "'--max-failures': Input should be greater than or equal to 0" in refusal("train", "--max-failures=-1")


def test_an_unknown_setting_is_rejected_with_a_suggestion(refusal: Refusal) -> None:
    message = refusal("train", "exchange_perod=3")
    assert "`exchange_perod` on the command line" in message and "`exchange_period`" in message


def test_an_unknown_setting_in_a_file_is_rejected_with_the_file(refusal: Refusal, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("lrr: 1.0e-5\n")
    assert "`lrr` in mine.yaml. Did you mean `lr`?" in refusal("train", "-c", "mine.yaml")


def test_an_unknown_preset_is_rejected_with_a_suggestion(refusal: Refusal) -> None:
    assert "Did you mean `imdb-tiny`?" in refusal("train", "imdb-tinny")


def test_two_presets_are_rejected(refusal: Refusal) -> None:
    assert "One preset or file" in refusal("train", "imdb-tiny", "imdb-tiny-ppo")


@pytest.mark.parametrize("command", [["train"], ["plan"], ["validate"], ["tune", "--over", "lr=1e-5,1e-4"]])
def test_a_missing_file_is_rejected_with_the_presets(refusal: Refusal, command: list[str]) -> None:
    message = refusal(*command, "mine.yaml")
    assert "mine.yaml does not exist. Use a YAML file, or a preset: " in message and ", imdb-tiny-ppo, " in message


def test_a_folder_is_rejected_as_a_settings_file(refusal: Refusal, tmp_path: Path) -> None:
    (tmp_path / "runs" / "one").mkdir(parents=True)
    assert "runs/one is a folder, not a file of settings." in refusal("train", "runs/one")


def test_an_invalid_value_is_rejected_with_the_value(refusal: Refusal) -> None:
    assert "`num_updates`='many'" in refusal("train", "num_updates=many")


@pytest.mark.parametrize(
    "words", [["train"], ["train", "lr=1e-4"], ["tune", "--over", "lr=1e-5"], ["plan"], ["validate"]]
)
def test_a_command_needs_a_preset_a_file_or_a_task(refusal: Refusal, words: list[str]) -> None:
    message = refusal(*words)
    assert "Name a preset or a file of settings, such as imdb-tiny or mine.yaml, or set task or env." in message
    assert f"The presets are {', '.join(presets())}." in message


def test_an_unwritable_cache_is_reported_with_a_remedy(
    refusal: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    message = refusal("train", "imdb-tiny", "model=smollm2")
    assert "Cannot write" in message and "Not a directory. Fix that, or set XDG_CACHE_HOME" in message


@pytest.mark.parametrize(
    ("words", "message_part"),
    [
        (["task=imbd"], "Unknown task 'imbd'"),
        (["max_prompt_tokens=5000"], "max_prompt_tokens + max_response_tokens"),
        (["model=./no-model"], "./no-model"),
        (
            ["gpus_per_runner=1", "gpus_per_learner=1"],
            "Set num_learners=1.",
        ),  # otherwise Ray would assign that GPU twice
        (["start_from=./no-run"], "start_from=./no-run is not a folder on this machine"),
    ],
)
def test_invalid_settings_are_rejected_before_a_folder_is_created(
    refusal: Refusal, words: list[str], message_part: str
) -> None:
    assert message_part in refusal("train", "imdb-tiny", *words)


@pytest.mark.parametrize(
    "words",
    [
        ["train", "imdb-tiny", "--out", "file://FOLDER/run"],
        pytest.param(["train", "imdb-tiny"], marks=pytest.mark.slow),
        pytest.param(["tune", "imdb-tiny", "--over", "lr=1e-5,1e-4"], marks=pytest.mark.slow),
    ],
)
def test_a_run_that_ray_cannot_place_is_rejected(
    cory_forked: Cory, cluster: dict[str, str], tmp_path: Path, words: list[str]
) -> None:
    words = [word.replace("FOLDER", str(tmp_path)) for word in words]
    environment = {**cluster, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    message = cory_forked(*words, "num_runners=1", "gpus_per_runner=1", **environment)
    assert message.returncode == 2 and "Ray has no room for" in message.stderr, message.stderr


@pytest.mark.parametrize(
    ("words", "message_part"),
    [
        (["train", "--resume", ""], "An argument is empty"),
        (["train", "--out="], "An argument is empty"),
        (["train", "-c", ""], "An argument is empty"),
        (["train", ""], "An argument is empty"),
        (["tune", "imdb-tiny", "--over", ""], "An argument is empty"),
        (["evaluate", ""], "An argument is empty"),
        (["train", "--print-config", "exchange_period="], "`exchange_period=` has no value"),
    ],
)
def test_an_unset_shell_variable_is_rejected_rather_than_replaced_by_the_default(
    refusal: Refusal, words: list[str], message_part: str
) -> None:
    message = refusal(*words)
    assert message_part in message and "s a shell variable unset?" in message


def test_debug_shows_the_traceback_of_a_user_error(cory_in_process: Cory) -> None:
    result = cory_in_process("train", "lrr=1", "--debug")
    assert result.returncode == 2 and "Traceback" in result.stderr


def test_a_missing_run_cannot_be_resumed(refusal: Refusal) -> None:
    assert "does not exist" in refusal("train", "--resume", "runs/nothing")


def test_the_output_of_print_config_can_be_used_as_a_settings_file(cory_in_process: Cory, tmp_path: Path) -> None:
    first = cory_in_process("train", "imdb-tiny-ppo", "lr=3e-5", "exchange_period=null", "--print-config")
    (tmp_path / "saved.yaml").write_text(first.stdout)
    second = cory_in_process("train", "-c", "saved.yaml", "--print-config")
    assert first.returncode == second.returncode == 0
    settings = yaml.safe_load(first.stdout)
    assert settings == yaml.safe_load(second.stdout)
    assert (settings["num_agents"], settings["lr"], settings["exchange_period"]) == (1, 3e-5, None)


def test_files_override_presets_in_order_and_arguments_override_files(cory_in_process: Cory, tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("lr: 1.0e-5\nnum_updates: 11\nseed: 1\n")
    (tmp_path / "two.yaml").write_text("num_updates: 22\nseed: 2\n")
    settings = yaml.safe_load(
        cory_in_process("train", "-c", "one.yaml", "-c", "two.yaml", "seed=3", "--print-config").stdout
    )
    default = yaml.safe_load(cory_in_process("train", "--print-config").stdout)
    changed = {key: value for key, value in settings.items() if value != default[key]}
    assert changed == {"lr": 1e-5, "num_updates": 22, "seed": 3}
    words = ["train", "seed=3", "one.yaml", "-c", "two.yaml", "--print-config"]
    assert yaml.safe_load(cory_in_process(*words).stdout) == settings


def test_a_preset_takes_precedence_over_a_file_with_its_name(cory_in_process: Cory, tmp_path: Path) -> None:
    (tmp_path / "imdb-tiny").write_text("num_updates: 7\n")
    (tmp_path / "own").write_text("num_updates: 7\n")
    assert "\nnum_updates: 45 " in cory_in_process("train", "imdb-tiny", "--print-config").stdout
    assert "\nnum_updates: 7 " in cory_in_process("train", "own", "--print-config").stdout


def test_validate_accepts_the_bundled_task(cory_in_process: Cory) -> None:
    result = cory_in_process("validate", "imdb-tiny")
    assert result.returncode == 0 and "The task is sound." in result.stdout


def test_validate_shows_a_task_for_each_tokenizer(cory_in_process: Cory) -> None:
    result = cory_in_process(
        "validate",
        "drafts",
        "model=[drafts-llama-tiny,imdb-gpt2-tiny]",
        "weights=full",
        "max_prompt_tokens=48",
        "max_response_tokens=9",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("The task is sound.") == 2
    assert all(f"With the tokenizer of {name}:" in result.stdout for name in ("drafts-llama-tiny", "imdb-gpt2-tiny"))


def test_validate_reports_errors_of_a_custom_task(cory_in_process: Cory, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def half(completions):\n    return [0.5]\n")
    (tmp_path / "mine.jsonl").write_text('{"query": "One"}\n{"query": "Two"}\n{"query": "Three"}\n')
    (tmp_path / "mine.yaml").write_text("task: custom\ndata: mine.jsonl\nreward: rewards:half\n")
    result = cory_in_process("validate", "mine.yaml")
    assert result.returncode == 2 and "rewards:half" in result.stdout
