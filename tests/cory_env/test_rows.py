"""User data: CSV, Parquet and hub data sets, other query columns, and conversations."""

import csv
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from cory_env.chain import Chain
from cory_env.tasks import DataError, Query, make_task
from cory_env.tasks.rows import read_queries, truncate_queries
from launch.training.validation import ValidationReport, check_columns
from tests.cory_env.sample_tasks import LENGTH, tokenizer

USER = {"role": "user", "content": "Name a fruit."}
CHECKOUT = str(Path(__file__).parents[2])


def table(path: Path, **columns: list[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path)
    return path


def csv_file(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "rows.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_csv_has_a_header_and_quoted_fields_with_commas_and_line_breaks(tmp_path: Path) -> None:
    data = csv_file(tmp_path, b'\xef\xbb\xbfquery,answer\r\n"Red, or\r\n""blue""?",4\r\nplain,\r\n\r\n')
    assert read_queries(data) == [Query(0, 'Red, or\r\n"blue"?', {"answer": "4"}), Query(1, "plain", {"answer": None})]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rows"),
        ("query,answer\n", "has no rows"),
        ("query,answer\na,1\nb,2,3\n", "line 3 has 3 fields, but the header names 2 columns: query, answer"),
        ('query,answer\n"a\nb",1\nc\n', "line 4 has 1 fields"),
        ("query\na\n\nb\n", "line 3 has 0 fields"),
        ("query,,answer\na,1,2\n", "line 1 must name every column"),
        ("query,answer,answer\na,1,2\n", "line 1 repeats the name 'answer'"),
        ('query\n"a" b\n', "line 2 is not valid CSV"),
        ('query\na\n"b\n', "line 3 is not valid CSV"),
        ('query\na\n"b\n' + "c\n" * 200, "line 3 is not valid CSV"),
        ('query,answer\n"a\nb\nc",1,2\n', "line 2 has 3 fields"),
        ('query,answer\n"a\nb",1\n" \n ",1\n', "line 4: 'query' is"),
        (b"query\na\n\xff\n", "line 3 is not UTF-8"),
        ("question\na\n", r"line 2 has no column 'query' \(it has question\).*\?query_column=COLUMN"),
        ("query,role\na,x\n", "line 2: the column 'role' conflicts"),
        ("query,completion_ids\na,x\n", "line 2: the column 'completion_ids' conflicts"),
        ('query,answer\n"  ",1\n', "line 2: 'query' is '  ', but must be non-empty text"),
        ("query,answer\n,1\n", "line 2: 'query' is None, but must be non-empty text"),
        ("query;answer\na;1\n", r"line 2 has no column 'query' \(it has query;answer\)"),
    ],
)
def test_a_malformed_csv_file_is_reported_with_its_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"rows.csv {message}"):
        read_queries(csv_file(tmp_path, text))


def test_parquet_keeps_numbers_and_lists_and_reports_rows_with_missing_values(tmp_path: Path) -> None:
    path = table(tmp_path / "rows.parquet", query=["a", "b"], answer=[1, 2], words=[["x"], ["y", "z"]])
    assert read_queries(path)[1] == Query(1, "b", {"answer": 2, "words": ["y", "z"]})
    table(path, query=["a", None], answer=[1, 2])
    with pytest.raises(DataError, match=r"rows.parquet row 2: 'query' is None"):
        read_queries(path)
    table(path, query=["a", "b"], unit=["cm", None])
    with pytest.raises(DataError, match=r"rows.parquet row 2 has no value in column 'unit'"):
        read_queries(path, required=["unit"])


def test_a_json_list_and_json_lines_give_the_same_rows(tmp_path: Path) -> None:
    rows = [{"query": "a, b", "answer": "1"}, {"query": "c", "answer": "é"}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    for name, text in {"rows.json": json.dumps(rows, indent=1), "lines.json": lines, "rows.JSONL": lines}.items():
        (tmp_path / name).write_text(text)
        queries = read_queries(tmp_path / name)
        assert [(query.text, query.columns["answer"]) for query in queries] == [("a, b", "1"), ("c", "é")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.json", b'[{"query": "a"}, 3]', "row 2 is a JSON int, but must be an object"),
        (
            "rows.json",
            b'[{"query": "a"},',
            "is not valid JSON: .* or one object on each line",
        ),
        ("rows.json", b'{"query": {"0": "a"}}', "line 1: 'query' is"),
        (
            "rows.xlsx",
            b"",
            r"unknown data format. Use a file that ends in .jsonl, .json, .csv, .parquet, or hub:",
        ),
    ],
)
def test_other_malformed_files_are_reported(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name} .*{message}|{name} {message}"):
        read_queries(tmp_path / name)


def test_a_folder_as_a_file_is_reported_with_the_right_form(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Data file .* not found in .*; for a folder of data files, write hub:FOLDER"):
        read_queries(tmp_path)


@pytest.mark.parametrize("extension", ["csv", "jsonl", "nan.jsonl", "json", "parquet"])
def test_missing_values_are_none_in_all_formats(tmp_path: Path, extension: str) -> None:
    path = tmp_path / f"rows.{extension}"
    if extension == "parquet":
        table(path, query=["a", "b"], unit=["cm", None], size=[1.0, float("nan")])
    elif extension == "csv":
        path.write_text('query,unit,size\na,cm,1\nb,"",\n')
    else:
        missing = "NaN" if extension.startswith("nan") else "null"
        rows = f'{{"query": "a", "unit": "cm", "size": 1}}\n{{"query": "b", "unit": {missing}, "size": {missing}}}\n'
        path.write_text(f"[{','.join(rows.splitlines())}]" if extension == "json" else rows)
    assert read_queries(path)[1].columns == {"unit": None, "size": None}
    with pytest.raises(
        DataError, match=r"(row 2|line [23]) has no value in column 'unit', which the prompts .*Fill it in"
    ):
        make_task("custom", data=path, reward=LENGTH, prompt="{query} {unit}")
    report = ValidationReport("custom")
    check_columns(Chain(make_task("custom", data=path, reward=LENGTH), tokenizer()), ["unit"], report)
    assert "1 of 1 queries of test have no value in the column 'unit', which the reward" in report.problems[0]


def test_an_empty_text_in_json_is_a_value(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"query": "a", "input": ""}\n' * 2)
    assert make_task("custom", data=path, reward=LENGTH, prompt="{query}{input}").train[0].columns == {"input": ""}


def test_a_file_that_is_not_parquet_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_text("query\na\n")
    with pytest.raises(DataError, match=r"rows.parquet row 1 cannot be read as Parquet"):
        read_queries(path)


def test_unreadable_parquet_values_are_reported_with_their_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    times = pyarrow.array([0, 0, 2**62], pyarrow.timestamp("us"))
    parquet.write_table(pyarrow.table({"query": ["a", "b", "c"], "time": times}), path, row_group_size=2)
    with pytest.raises(DataError, match=r"rows.parquet row 3 cannot be read as Parquet: .*Correct the value"):
        read_queries(path)
    latin = pyarrow.array([b"a", b"caf\xe9"])
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 2, latin.buffers())
    parquet.write_table(pyarrow.table({"query": texts}), path)
    with pytest.raises(DataError, match=r"rows.parquet row 2 cannot be read as Parquet: 'utf-8' codec"):
        read_queries(path)


def test_a_repeated_column_in_a_parquet_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    repeated = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["query", "query"])
    parquet.write_table(repeated, path)
    with pytest.raises(DataError, match=r"rows.parquet repeats the name 'query'"):
        read_queries(path)


def test_a_column_is_none_in_rows_that_lack_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"query": "a"}\n{"answer": 4, "query": "b"}\n')
    assert [query.columns for query in read_queries(path)] == [{"answer": None}, {"answer": 4}]


def test_the_source_may_name_another_query_column(tmp_path: Path) -> None:
    data = csv_file(tmp_path, "question,prompt\nWhy?,unused\nHow?,too\n")
    assert read_queries(f"{data}?query_column=question")[0] == Query(0, "Why?", {"prompt": "unused"})
    task = make_task("custom", data=f"{data}?query_column=question", reward=LENGTH, prompt="{query} ({prompt})")
    assert task.prompt(task.train[0]) == "Why? (unused)"
    with pytest.raises(
        DataError, match=r"'question', which the prompts or the reward require.*in prompts, the query itself is {query}"
    ):
        make_task("custom", data=f"{data}?query_column=question", reward=LENGTH, prompt="{query} {question}")


@pytest.mark.parametrize(
    "tail", ["?question", "?split=train", "?query_column=a&b", "?Query=a", "?query_column=a&query_column=b"]
)
def test_invalid_settings_of_a_file_are_rejected_with_the_valid_ones(tmp_path: Path, tail: str) -> None:
    data = csv_file(tmp_path, "query\na\n")
    with pytest.raises(
        DataError, match=r"Valid settings: query_column\.|without repetition; .* such as .*\?query_column=question"
    ):
        read_queries(f"{data}{tail}")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Query]]:
    """Reads queries, through the package `datasets`, from a folder with the layout of a hub data set."""
    pytest.importorskip("datasets", reason="the extra hub is not installed")
    from datasets import config

    folder = tmp_path_factory.mktemp("hub")
    config.HF_DATASETS_CACHE = folder / "cache"
    for split in ("train", "test"):
        texts: list[object] = [f"{split} review {i}" for i in range(5)]
        table(folder / "reviews" / "data" / f"{split}-00000-of-00001.parquet", text=texts, label=[0, 1, 0, 1, 0])
    return lambda tail: read_queries(f"hub:{folder / 'reviews'}{tail}")


def test_a_hub_data_set_is_read_by_split_and_column(hub: Callable[[str], list[Query]]) -> None:
    assert hub("?query_column=text")[1] == Query(1, "train review 1", {"label": 1})
    assert [query.text for query in hub("?split=test[3:]&query_column=text")] == ["test review 3", "test review 4"]


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        ("?split=valid&query_column=text", r"\(split=valid\) cannot be loaded: Unknown split .*'train', 'test'"),
        ("?config=de&query_column=text", r"\(split=train, config=de\) cannot be loaded: .*'de' not found"),
        ("?query_column=question", r"row 1 has no column 'question' \(it has text, label\)"),
        ("/nowhere?query_column=text", "Data set hub:.*/nowhere not found"),
        ("?column=text", "Valid settings: query_column, split, config, revision"),
    ],
)
def test_missing_parts_of_a_hub_data_set_are_reported(
    hub: Callable[[str], list[Query]], tail: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        hub(tail)


def test_a_folder_of_other_files_is_a_hub_data_set(hub: Callable[[str], list[Query]], tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_text("query\tunit\na\tcm\n")
    assert read_queries(f"hub:{tmp_path}") == [Query(0, "a", {"unit": "cm"})]
    (tmp_path / "zipped").mkdir()
    (tmp_path / "zipped" / "rows.jsonl.gz").write_bytes(gzip.compress(b'{"query": "a"}\n'))
    assert read_queries(f"hub:{tmp_path / 'zipped'}") == [Query(0, "a")]


def test_an_unreachable_hub_and_a_missing_package_are_reported(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom cory_env.tasks.rows import read_queries\n"
        "for _ in range(2):\n"
        "    try: read_queries('hub:no-such-owner/no-such-set?query_column=text')\n"
        "    except ValueError as error: print(error)\n"
        "    sys.modules['datasets'] = None\n"
    )
    pytest.importorskip("datasets", reason="the extra hub is not installed")
    path = os.pathsep.join([CHECKOUT, *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", script]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    unreachable, missing = output.splitlines()
    assert "hub:no-such-owner/no-such-set (split=train) cannot be loaded: Couldn't reach" in unreachable
    assert "requires the package datasets: pip install 'cory-rllib[hub]'" in missing


def test_a_conversation_that_ends_with_a_user_message_is_a_query(tmp_path: Path) -> None:
    history = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = table(tmp_path / "rows.parquet", prompt=[[*history, USER]], answer=["apple"])
    (query,) = read_queries(f"{path}?query_column=prompt")
    assert (query.text, query.columns) == ("Name a fruit.", {"answer": "apple"})
    assert query.history == tuple(history) and query.raw == [*history, USER]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([USER, {"role": "assistant", "content": "Apple."}], "does not end with a user message"),
        ([{"role": "user", "content": [{"type": "image"}]}], "images and tool calls are not supported"),
        (["Name a fruit."], 'each message must be {"role"'),
    ],
)
def test_an_invalid_conversation_is_rejected(tmp_path: Path, prompt: object, message: str) -> None:
    path = table(tmp_path / "rows.parquet", query=[prompt])
    with pytest.raises(DataError, match=f"rows.parquet row 1: 'query' is a conversation.*{message}"):
        read_queries(path)


def test_conversations_in_csv_must_be_json(tmp_path: Path) -> None:
    history = [{"role": "system", "content": 'Be "brief".'}]
    data = tmp_path / "rows.csv"

    def write(*cells: str) -> None:
        with data.open("w", newline="") as file:
            csv.writer(file).writerows([["query"], *([cell] for cell in cells)])

    write(json.dumps([*history, USER]), f" {json.dumps([{'content': 'Hi', 'role': 'user'}], indent=1)}\n")
    first, second = read_queries(data)
    assert (first.text, first.history) == ("Name a fruit.", tuple(history)) and (second.text, second.history) == (
        "Hi",
        (),
    )
    for cell in (str([*history, USER]), str(np.array([*history, USER])), str([{"name": "Bo", **USER}])):
        write(cell)
        with pytest.raises(DataError, match=r"line 2: 'query' is a conversation, but not valid JSON.*json.dumps"):
            read_queries(data)
    write(json.dumps([{"role": "assistant", "content": "Hi"}]))
    with pytest.raises(DataError, match="does not end with a user message"):
        read_queries(data)
    for text in ('[{"a": 1}]', "[1, 2]", f"{json.dumps([USER])} Sum this up.", "The {role}: [content]"):
        write(text)
        assert read_queries(data) == [Query(0, text)]


def test_truncation_is_deterministic_and_keeps_the_first_tokens() -> None:
    text = "The acting is, as ever, wonderful, and nobody in the audience looked at a watch even once. "
    queries = [Query(i, text * 50, {"label": i}) for i in range(100)]
    truncated = truncate_queries(queries, tokenizer(), 2, 8)
    assert truncated == truncate_queries(queries, tokenizer(), 2, 8)
    lengths = [len(tokenizer()(query.text)["input_ids"]) for query in truncated]
    assert set(lengths) == {2, 3, 4, 5, 6, 7, 8}
    assert all(text.startswith(query.text) for query in truncated)
    assert [(query.id, query.columns) for query in truncated] == [(query.id, query.columns) for query in queries]


def test_truncation_drops_split_characters_and_keeps_short_texts() -> None:
    assert truncate_queries([Query(0, "Fun")], tokenizer(), 8, 8)[0].text == "Fun"
    (truncated,) = truncate_queries([Query(0, "A film 😀😀")], tokenizer(), 4, 4)
    assert truncated.text.startswith("A film") and "A film 😀".startswith(truncated.text.rstrip())
    (first,) = truncate_queries([Query(0, "😀 is how I felt")], tokenizer(), 1, 1)
    assert first.text == "😀"
