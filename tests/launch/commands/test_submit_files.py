"""`cory submit` rejects commands whose files would not be uploaded, before anything is sent."""

import contextlib
from pathlib import Path

import pytest

from launch.cluster.upload import check_uploaded, uploaded_sizes
from launch.commands.submit import find_named_files
from launch.console.errors import CommandError
from launch.main import main


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A working directory with files that commands name."""
    folder = tmp_path / "project"
    for name in ("data.jsonl", "held/out.jsonl", "m/config.json", "m/model.safetensors", "r.py", "mine/rewards.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    (tmp_path / "beside.jsonl").write_text("{}")
    (folder / "t.yaml").write_text("task: custom\ndata: data.jsonl\nmodel: m\nreward: r:ok\n")
    arms_yaml = "arms:\n  one: {}\n  two: {eval_data: held/out.jsonl}\n"
    (folder / "study.yaml").write_text(f"settings: {{task: custom, data: data.jsonl, reward: r:ok}}\n{arms_yaml}")
    return folder


def check_files(folder: Path, *words: str) -> None:
    with contextlib.chdir(folder):
        check_uploaded(folder, uploaded_sizes(folder), find_named_files(words))


COMMANDS = [
    ("train", "t.yaml"),
    ("train", "-c", "t.yaml", "eval_data=held/out.jsonl?query_column=text"),
    ("train", "task=custom", "data=./data.jsonl", "model=[m,m]", "reward=['r:ok?a=b','mine.rewards:ok']"),
    ("tune", "t.yaml", "--over", "eval_data=data.jsonl,held/out.jsonl"),
    ("study", "study.yaml", "--out", "/shared/study"),
    ("validate", "t.yaml", "credit=mine.rewards:pay"),
    ("generate", "/shared/run", "--in", "data.jsonl", "--out", "/shared/answers.jsonl"),
    ("train", "imdb-tiny", "model=owner/model", "data=hub:owner/data?split=train", "reward=installed.module:f"),
    ("train", "t.yaml", "data=/shared/other.jsonl", "start_from=s3://bucket/run"),
    ("train", "t.yaml", "stop=.", "system_prompt=runs"),  # text, although such folders exist
]


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_whose_files_are_uploaded_is_accepted(project: Path, words: tuple[str, ...]) -> None:
    (project / ".gitignore").write_text("runs/\n*.bin\n*.log\n")
    (project / "runs").mkdir()
    for name in ("runs/one.txt", "debug.log"):
        (project / name).touch()
    check_files(project, *words)


@pytest.mark.parametrize(
    ("ignore", "rule", "words", "message"),
    [
        (".gitignore", "*.jsonl", COMMANDS[0], r"data\.jsonl is excluded"),
        (".rayignore", "held", COMMANDS[1], r"held/out\.jsonl is excluded"),
        (
            "held/.gitignore",
            "out*",
            COMMANDS[3],
            r"held/out\.jsonl is excluded",
        ),
        (".gitignore", "*.safetensors", COMMANDS[0], r"m/model\.safetensors is excluded"),
        (".rayignore", "mine/", COMMANDS[2], r"mine/rewards\.py is excluded"),
        (".gitignore", "/r.py", COMMANDS[0], r"r\.py is excluded"),
        (".gitignore", "t.yaml", COMMANDS[0], r"t\.yaml is excluded"),
        (".gitignore", "study*", COMMANDS[4], r"study\.yaml is excluded"),
        (".rayignore", "held/*", COMMANDS[4], r"held/out\.jsonl is excluded"),
        (".gitignore", "mine", COMMANDS[5], r"mine/rewards\.py is excluded"),
        (".gitignore", "data.jsonl", COMMANDS[6], r"data\.jsonl is excluded"),
    ],
)
def test_a_command_with_a_file_excluded_from_the_upload_is_rejected(
    project: Path, ignore: str, rule: str, words: tuple[str, ...], message: str
) -> None:
    (project / ignore).write_text(f"# ours\n{rule}\n")
    with pytest.raises(CommandError, match=message):
        check_files(project, *words)


def test_negated_and_disabled_ignore_rules_have_no_effect(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / ".gitignore").write_text("*.jsonl\n!data.jsonl\n")
    check_files(project, "train", "t.yaml")
    (project / ".gitignore").write_text("*.jsonl\n")
    monkeypatch.setenv("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "1")
    check_files(project, "train", "t.yaml")


def test_files_outside_the_working_directory_are_rejected(project: Path) -> None:
    with pytest.raises(CommandError, match=r"\.\./beside\.jsonl is outside the working directory .*/project, "):
        check_files(project, "train", "t.yaml", "data=../beside.jsonl")


def test_missing_data_is_rejected_and_names_may_contain_spaces(project: Path) -> None:
    for words in (
        ("data=nope.csv",),
        ("data=my data.csv?query_column=text",),
        ("--over", "eval_data=data.jsonl,nope.csv"),
    ):
        with pytest.raises(CommandError, match=r"^(nope|my data)\.csv not found in the working directory .*/project, "):
            check_files(project, "tune", "t.yaml", *words)
    (project / "my data.csv").touch()
    check_files(project, "train", "t.yaml", "data=my data.csv?query_column=text")
    (project / "t.yaml").write_text("data: nope.csv\n")
    check_files(project, "train", "t.yaml", "data=data.jsonl")  # the argument takes precedence
    (project / ".rayignore").write_text("my data.csv\n")
    with pytest.raises(CommandError, match=r"my data\.csv is excluded"):
        check_files(project, "train", "t.yaml", "data=my data.csv?query_column=text")


def test_an_excluded_file_is_rejected_before_anything_is_sent(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")  # nothing listens there
    (project / ".gitignore").write_text("*.jsonl\n")
    assert main(["submit", "--storage", "/shared", "--", "train", "t.yaml"]) == 2
    assert "Error: data.jsonl is excluded from the upload by a" in capsys.readouterr().err
