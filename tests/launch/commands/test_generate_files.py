"""`cory generate` from a file into a file, several answers to a query, and conversations."""

import dataclasses
import datetime
import json
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cory_env.tasks import Query
from cory_env.tokenizer import load_tokenizer
from launch.main import main
from launch.models import trained_chain
from launch.models.trained import open_trained
from launch.models.trained_chain import TrainedChain
from launch.run_folder.run import Run
from policies.models.model_names import model_path
from policies.settings.settings import Settings
from tests.launch.conftest import ENVIRONMENT, RUN_SETTINGS, Cory, record, write_policies

QUERIES = ["This movie", "I did not expect", "The acting", "A film"]


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def asked(run: Run, source: Path, out: Path, *words: str, backend: str = "transformers") -> int:
    return main(["generate", str(run.path), "--in", str(source), "--out", str(out), "--backend", backend, *words])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "queries.jsonl"
    file.write_text("".join(json.dumps({"query": text, "id": f"q{n}"}) + "\n" for n, text in enumerate(QUERIES)))
    return file


@pytest.fixture(scope="module")
def chat_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose prompts are conversations."""
    folder = tmp_path_factory.mktemp("chat")
    shutil.copytree(model_path("imdb-gpt2-tiny"), folder / "model")
    tokenizer = load_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages if m.role != 'developer' %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
    )
    tokenizer.save_pretrained(folder / "model")
    data = folder / "data.jsonl"
    data.write_text('{"query": "One"}\n{"query": "Two"}\n')
    changes = {"model": str(folder / "model"), "chat": True, "task": "custom", "data": str(data), "num_agents": 1}
    settings = Settings(**{**RUN_SETTINGS.model_dump(), **changes, "reward": "tests.policies.sample_rewards:letters"})
    run = record(folder / "run", settings, updates=range(2))
    run.checkpoints.save(1, lambda place: write_policies(place, settings, seed=1))
    run.unlock()
    return run


def test_rows_of_a_file_are_answered_as_one_by_one_several_times_each(
    policies_run: Run, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "answers.jsonl"
    assert asked(policies_run, source, out, "--samples", "2", "--temperature", "0.5", "--seed", "3") == 0
    assert capsys.readouterr().out == f"{out}: 8 answers, by transformers.\n"
    assert [file.name for file in out.parent.iterdir()] == ["answers.jsonl"]
    single = TrainedChain(open_trained(policies_run.path), ("llm_2", "llm_1"), 0.5, 3)
    assert rows(out) == [
        {"row": number, "sample": sample, "columns": {"id": f"q{number}"}}
        | dict(single.answer(number, text, sample=sample))
        for number, text in enumerate(QUERIES)
        for sample in range(2)
    ]


def test_an_answering_that_was_killed_goes_on_where_it_was_and_another_one_begins_anew(
    policies_run: Run,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(trained_chain.AT_ONCE, "transformers", 2)
    whole, out, part = tmp_path / "whole.jsonl", tmp_path / "out.jsonl", tmp_path / ".out.jsonl.part"
    assert asked(policies_run, source, whole, "--roles", "llm_1") == 0

    answer_all, batches = TrainedChain.answer_all, []

    def killed(chain: TrainedChain, prompt_refs: Any) -> Any:
        batches.append(prompt_refs)
        if len(batches) == 2:
            raise KeyboardInterrupt
        return answer_all(chain, prompt_refs)

    monkeypatch.setattr(TrainedChain, "answer_all", killed)
    assert asked(policies_run, source, out, "--roles", "llm_1") == 130
    assert f"1 of 2 batches are saved in {part}. Repeat the command to continue." in capsys.readouterr().err
    assert part.exists() and not out.exists()
    with part.open("a") as file:
        file.write('{"batch": 1, "ro')
    kept = part.read_bytes()
    assert asked(policies_run, source, out, "--roles", "llm_1") == 0
    assert len(batches) == 3 and out.read_bytes() == whole.read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.jsonl", "queries.jsonl", "whole.jsonl"]

    out.unlink()
    part.write_bytes(kept)
    assert asked(policies_run, source, out, "--roles", "llm_2") == 0
    assert len(batches) == 5 and [row["responses"][0]["policy"] for row in rows(out)] == ["llm_2"] * 4


def test_tables_and_conversations_are_read(
    policies_run: Run, chat_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = [
        {"role": "user", "content": "Name a film."},
        {"role": "assistant", "content": "Solaris."},
        {"role": "user", "content": "Another."},
    ]
    talks, table = tmp_path / "talks.jsonl", tmp_path / "queries.parquet"
    talks.write_text(json.dumps({"query": talk}) + "\n")
    assert asked(chat_run, talks, tmp_path / "talked.jsonl") == 0
    (row,) = rows(tmp_path / "talked.jsonl")
    assert row["query"] == talk and "columns" not in row
    single = TrainedChain(open_trained(chat_run.path), ("llm_1",), 0.7, 0)
    told = single.answer(0, "Another.", history=talk[:2])  # type: ignore[arg-type]
    assert row["responses"] == told["responses"] != single.answer(0, "Another.")["responses"]

    ruled = tmp_path / "ruled.jsonl"
    ruled.write_text(json.dumps({"query": [{"role": "developer", "content": "In French."}, talk[0]]}) + "\n")
    assert asked(chat_run, ruled, tmp_path / "no.jsonl") == 2
    assert "leaves out the message of the role developer in a conversation" in capsys.readouterr().err
    assert asked(policies_run, talks, tmp_path / "no.jsonl") == 2
    assert "Row 1 is a conversation, but this run was trained without a chat template" in capsys.readouterr().err
    dates = [datetime.date(2020, 1, day) for day in (1, 2, 3, 4)]
    pq.write_table(pa.table({"question": QUERIES, "day": dates}), table)
    assert (
        asked(policies_run, Path(f"{table}?query_column=question"), tmp_path / "table.jsonl", "--roles", "llm_1") == 0
    )
    found = rows(tmp_path / "table.jsonl")
    assert [row["query"] for row in found] == QUERIES and found[1]["columns"] == {"day": "2020-01-02"}


def test_columns_fill_prompts_that_hold_them(policies_run: Run, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"query": "movie", "hint": "One"}\n{"query": "film", "hint": "Two"}\n')
    trained = open_trained(policies_run.path)
    own = {"task": "custom", "data": str(data), "reward": "tests.policies.sample_rewards:letters"}
    own |= {"prompt": "{hint} {query}"}
    trained = dataclasses.replace(trained, settings=trained.settings.model_copy(update=own))
    chain = TrainedChain(trained, ("llm_1",), 0, 0)
    assert chain.columns == {"hint"}
    (answered,) = chain.answer_all([(Query(0, "movie", {"hint": "This"}), 0)])
    bare = TrainedChain(open_trained(policies_run.path), ("llm_1",), 0, 0).answer(0, "This movie")
    assert answered["responses"] == bare["responses"]


@pytest.mark.slow
def test_vllm_answers_where_it_is_installed(policies_run: Run, source: Path, tmp_path: Path, cory: Cory) -> None:
    words = [str(policies_run.path), "--in", str(source), "--temperature", "0"]
    by_vllm = cory("generate", *words, "--out", "vllm.jsonl")
    assert by_vllm.returncode == 0 and by_vllm.stdout == "vllm.jsonl: 4 answers, by vllm.\n", by_vllm.stderr
    assert asked(policies_run, source, tmp_path / "own.jsonl", "--temperature", "0") == 0
    assert rows(tmp_path / "vllm.jsonl") == rows(tmp_path / "own.jsonl")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--out", "a.jsonl"], "--out requires --in."),
        (["--in", "q.jsonl"], "--in FILE requires --out FILE"),
        (["This movie", "--in", "q.jsonl", "--out", "a.jsonl"], "excludes QUERY and --json"),
        (["--in", "q.jsonl", "--out", "a.csv"], "a.csv: answers are written as JSON Lines."),
        (["--in", "q.jsonl", "--out", "taken.jsonl"], "taken.jsonl is there already"),
        (["--in", "none.jsonl", "--out", "a.jsonl"], "none.jsonl"),
        (["--in", "long.jsonl", "--out", "a.jsonl"], "Query 1 of task imdb needs a prompt of"),
    ],
)
def test_what_cannot_be_answered_writes_nothing(
    policies_run: Run, tmp_path: Path, cory_here: Cory, words: list[str], what: str
) -> None:
    (tmp_path / "q.jsonl").write_text('{"query": "a"}\n')
    (tmp_path / "long.jsonl").write_text('{"query": "a"}\n' + json.dumps({"query": "word " * 90}) + "\n")
    (tmp_path / "taken.jsonl").touch()
    before = sorted(tmp_path.iterdir())
    result = cory_here("generate", str(policies_run.path), *words)
    assert result.returncode == 2 and what in result.stderr, result.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_at_a_terminal_a_conversation_goes_on_until_another_is_begun(chat_run: Run) -> None:
    terminal, inside = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "cory_rllib", "generate", str(chat_run.path), "--temperature", "0"],
        env={**ENVIRONMENT, "TERM": "dumb"},
        stdin=inside,
        stdout=inside,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(inside)

    def until_asked() -> str:
        seen = ""
        while "query: " not in seen:
            assert select.select([terminal], [], [], 200)[0], seen
            seen += os.read(terminal, 1024).decode()
        return seen

    def answer(text: str) -> str:
        os.write(terminal, f"{text}\n".encode())
        shown = until_asked().partition("pioneer (llm_1): ")[2].partition("\r\n")[0]
        return shown.removeprefix("\x1b[0m")  # which ends what is dim

    try:
        assert "/new begins anew" in until_asked()
        first, second = answer("Name a film."), answer("Another.")
        assert answer("/new") == ""
        alone = answer("Another.")
    finally:
        process.kill()
        os.close(terminal)
    single = TrainedChain(open_trained(chat_run.path), ("llm_1",), 0, 0)
    one = single.answer(0, "Name a film.")["responses"][0]["text"]
    said: Any = [{"role": "user", "content": "Name a film."}, {"role": "assistant", "content": one}]
    two = single.answer(1, "Another.", history=said)["responses"][0]["text"]
    assert [first, second] == [one.lstrip(), two.lstrip()]
    assert alone == single.answer(2, "Another.")["responses"][0]["text"].lstrip() != second
