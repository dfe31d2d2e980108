"""Data as users have it: CSV, Parquet and hub data sets, other names for the query's column, conversations."""

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

from cory_env.tasks import DataError, Query, make_task
from cory_env.tasks.rows import read_queries, truncate_queries
from cory_env.validate import Report, check_columns
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


def test_csv_takes_its_columns_from_the_header_and_quotes_may_hold_commas_and_line_breaks(tmp_path: Path) -> None:
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
        ("query,answer,answer\na,1,2\n", "line 1 names 'answer' twice"),
        ('query\n"a" b\n', "line 2 is not valid CSV"),
        ('query\na\n"b\n', "line 3 is not valid CSV"),
        (b"query\na\n\xff\n", "line 3 is not UTF-8"),
        ("question\na\n", r"line 2 has no column 'query' \(it has question\).*\?query_column=COLUMN"),
        ("query,role\na,x\n", "line 2: the column name 'role' is taken"),
        ("query,completion_ids\na,x\n", "line 2: the column name 'completion_ids' is taken"),
        ('query,answer\n"  ",1\n', "line 2: 'query' is '  ', but must be text"),
        ("query,answer\n,1\n", "line 2: 'query' is None, but must be text"),
        ("query;answer\na;1\n", r"line 2 has no column 'query' \(it has query;answer\)"),
    ],
)
def test_a_malformed_csv_file_is_named_with_its_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"rows.csv {message}"):
        read_queries(csv_file(tmp_path, text))


def test_parquet_keeps_numbers_and_lists_and_names_the_row_of_a_query_that_is_none(tmp_path: Path) -> None:
    path = table(tmp_path / "rows.parquet", query=["a", "b"], answer=[1, 2], words=[["x"], ["y", "z"]])
    assert read_queries(path)[1] == Query(1, "b", {"answer": 2, "words": ["y", "z"]})
    table(path, query=["a", None], answer=[1, 2])
    with pytest.raises(DataError, match=r"rows.parquet row 2: 'query' is None"):
        read_queries(path)
    table(path, query=["a", "b"], unit=["cm", None])
    with pytest.raises(DataError, match=r"rows.parquet row 2 has no value in column 'unit'"):
        read_queries(path, required=["unit"])


def test_json_holds_the_same_rows_as_a_list_and_by_line(tmp_path: Path) -> None:
    rows = [{"query": "a, b", "answer": "1"}, {"query": "c", "answer": "é"}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    for name, text in {"rows.json": json.dumps(rows, indent=1), "lines.json": lines, "rows.JSONL": lines}.items():
        (tmp_path / name).write_text(text)
        found = read_queries(tmp_path / name)
        assert [(query.text, query.columns["answer"]) for query in found] == [("a, b", "1"), ("c", "é")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.json", b'[{"query": "a"}, 3]', "row 2 is a JSON int, but must be an object"),
        (
            "rows.json",
            b'[{"query": "a"},',
            "is not valid JSON in UTF-8: .* or one object on each line",
        ),
        ("rows.json", b'{"query": {"0": "a"}}', "line 1: 'query' is"),
        (
            "rows.xlsx",
            b"",
            r"must end in .jsonl, .json, .csv, .parquet, and a data set of the hub is written hub:",
        ),
    ],
)
def test_what_is_wrong_with_another_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name} .*{message}|{name} {message}"):
        read_queries(tmp_path / name)


def test_a_folder_leads_to_the_form_that_reads_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"There is no data file .*; a folder of data files is hub:FOLDER"):
        read_queries(tmp_path)


@pytest.mark.parametrize("form", ["csv", "jsonl", "nan.jsonl", "json", "parquet"])
def test_what_is_missing_is_none_in_all_formats(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"rows.{form}"
    if form == "parquet":
        table(path, query=["a", "b"], unit=["cm", None], size=[1.0, float("nan")])
    elif form == "csv":
        path.write_text('query,unit,size\na,cm,1\nb,"",\n')
    else:
        missing = "NaN" if form.startswith("nan") else "null"
        rows = f'{{"query": "a", "unit": "cm", "size": 1}}\n{{"query": "b", "unit": {missing}, "size": {missing}}}\n'
        path.write_text(f"[{','.join(rows.splitlines())}]" if form == "json" else rows)
    assert read_queries(path)[1].columns == {"unit": None, "size": None}
    with pytest.raises(
        DataError, match=r"(row 2|line [23]) has no value in column 'unit', which the prompts .*Fill it in"
    ):
        make_task("custom", data=path, reward=LENGTH, prompt="{query} {unit}")
    report = Report("custom")
    check_columns(make_task("custom", data=path, reward=LENGTH), ["unit"], report)
    assert "1 of 1 queries of test have no value in the column 'unit', which the reward" in report.problems[0]


def test_an_empty_text_in_json_is_a_value(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"query": "a", "input": ""}\n' * 2)
    assert make_task("custom", data=path, reward=LENGTH, prompt="{query}{input}").train[0].columns == {"input": ""}


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_text("query\na\n")
    with pytest.raises(DataError, match=r"rows.parquet cannot be read as Parquet, after 0 rows"):
        read_queries(path)


def test_a_value_in_a_parquet_file_that_python_cannot_hold_is_named_with_its_row_and_column(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    times = pyarrow.array([0, 0, 2**62], pyarrow.timestamp("us"))
    parquet.write_table(pyarrow.table({"query": ["a", "b", "c"], "time": times}), path, row_group_size=2)
    with pytest.raises(DataError, match=r"rows.parquet row 3 holds a value in column 'time' that cannot be read"):
        read_queries(path)
    latin = pyarrow.array([b"a", b"caf\xe9"])
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 2, latin.buffers())
    parquet.write_table(pyarrow.table({"query": texts}), path)
    with pytest.raises(DataError, match=r"rows.parquet row 2 holds a value in column 'query' .*'utf-8' codec"):
        read_queries(path)


def test_a_column_that_stands_twice_in_a_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["query", "query"])
    parquet.write_table(twice, path)
    with pytest.raises(DataError, match=r"rows.parquet names 'query' twice"):
        read_queries(path)


def test_a_column_that_some_rows_lack_is_none_there(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"query": "a"}\n{"answer": 4, "query": "b"}\n')
    assert [query.columns for query in read_queries(path)] == [{"answer": None}, {"answer": 4}]


def test_another_column_is_the_query_where_the_source_names_it(tmp_path: Path) -> None:
    data = csv_file(tmp_path, "question,prompt\nWhy?,unused\nHow?,too\n")
    assert read_queries(f"{data}?query_column=question")[0] == Query(0, "Why?", {"prompt": "unused"})
    task = make_task("custom", data=f"{data}?query_column=question", reward=LENGTH, prompt="{query} ({prompt})")
    assert task.prompt(task.train[0]) == "Why? (unused)"
    with pytest.raises(
        DataError, match=r"'question', which the prompts or the reward use.*the query itself is {query} in prompts"
    ):
        make_task("custom", data=f"{data}?query_column=question", reward=LENGTH, prompt="{query} {question}")


@pytest.mark.parametrize(
    "tail", ["?question", "?split=train", "?query_column=a&b", "?Query=a", "?query_column=a&query_column=b"]
)
def test_settings_that_a_file_does_not_take_are_refused_with_those_it_takes(tmp_path: Path, tail: str) -> None:
    data = csv_file(tmp_path, "query\na\n")
    with pytest.raises(
        DataError, match=r"It may have: query_column\.|each setting once, such as .*\?query_column=question"
    ):
        read_queries(f"{data}{tail}")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Query]]:
    """A folder laid out like a hub data set of two splits, read by the library `datasets` itself."""
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
        ("/nowhere?query_column=text", "There is no data set hub:.*/nowhere"),
        ("?column=text", "It may have: query_column, split, config, revision"),
    ],
)
def test_what_a_hub_data_set_lacks_is_named(hub: Callable[[str], list[Query]], tail: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        hub(tail)


def test_a_folder_of_other_files_is_read_as_a_hub_data_set(hub: Callable[[str], list[Query]], tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_text("query\tunit\na\tcm\n")
    assert read_queries(f"hub:{tmp_path}") == [Query(0, "a", {"unit": "cm"})]
    (tmp_path / "zipped").mkdir()
    (tmp_path / "zipped" / "rows.jsonl.gz").write_bytes(gzip.compress(b'{"query": "a"}\n'))
    assert read_queries(f"hub:{tmp_path / 'zipped'}") == [Query(0, "a")]


def test_a_hub_that_cannot_be_reached_and_a_library_that_is_missing_are_named(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom cory_env.tasks.rows import read_queries\n"
        "if 'without' in sys.argv: sys.modules['datasets'] = None\n"
        "try: read_queries('hub:no-such-owner/no-such-set?query_column=text')\n"
        "except ValueError as error: print(error)"
    )
    pytest.importorskip("datasets", reason="the extra hub is not installed")
    path = os.pathsep.join([CHECKOUT, *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    printed = [
        subprocess.run(
            [sys.executable, "-c", script, *words], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for words in ([], ["without"])
    ]
    assert "hub:no-such-owner/no-such-set (split=train) cannot be loaded: Couldn't reach" in printed[0]
    assert "needs the library datasets: pip install 'cory-rllib[hub]'" in printed[1]


def test_a_conversation_that_the_user_ends_is_a_query_with_its_history(tmp_path: Path) -> None:
    before = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = table(tmp_path / "rows.parquet", prompt=[[*before, USER]], answer=["apple"])
    (query,) = read_queries(f"{path}?query_column=prompt")
    assert (query.text, query.columns) == ("Name a fruit.", {"answer": "apple"})
    assert query.history == tuple(before) and query.raw == [*before, USER]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([USER, {"role": "assistant", "content": "Apple."}], "does not end with what the user says"),
        ([{"role": "user", "content": [{"type": "image"}]}], "images and tool calls are not supported"),
        (["Name a fruit."], 'each message must be {"role"'),
    ],
)
def test_a_conversation_that_cannot_be_a_query_is_refused(tmp_path: Path, prompt: object, message: str) -> None:
    path = table(tmp_path / "rows.parquet", query=[prompt])
    with pytest.raises(DataError, match=f"rows.parquet row 1: 'query' is a conversation.*{message}"):
        read_queries(path)


def test_a_conversation_in_a_file_of_texts_is_read_as_json_and_refused_as_python_writes_it(tmp_path: Path) -> None:
    before = [{"role": "system", "content": 'Be "brief".'}]
    data = tmp_path / "rows.csv"

    def write(*cells: str) -> None:
        with data.open("w", newline="") as file:
            csv.writer(file).writerows([["query"], *([cell] for cell in cells)])

    write(json.dumps([*before, USER]), f" {json.dumps([{'content': 'Hi', 'role': 'user'}], indent=1)}\n")
    one, other = read_queries(data)
    assert (one.text, one.history) == ("Name a fruit.", tuple(before)) and (other.text, other.history) == ("Hi", ())
    for cell in (str([*before, USER]), str(np.array([*before, USER])), str([{"name": "Bo", **USER}])):
        write(cell)
        with pytest.raises(DataError, match=r"line 2: 'query' is a conversation, but not as JSON.*json.dumps"):
            read_queries(data)
    write(json.dumps([{"role": "assistant", "content": "Hi"}]))
    with pytest.raises(DataError, match="does not end with what the user says"):
        read_queries(data)
    for text in ('[{"a": 1}]', "[1, 2]", f"{json.dumps([USER])} Sum this up.", "The {role}: [content]"):
        write(text)
        assert read_queries(data) == [Query(0, text)]


def test_long_texts_are_cut_to_their_first_tokens_and_to_the_same_ones_each_time() -> None:
    text = "The acting is, as ever, wonderful, and nobody in the audience looked at a watch even once. "
    queries = [Query(i, text * 50, {"label": i}) for i in range(100)]
    cut = truncate_queries(queries, tokenizer(), 2, 8)
    assert cut == truncate_queries(queries, tokenizer(), 2, 8)
    lengths = [len(tokenizer()(query.text)["input_ids"]) for query in cut]
    assert set(lengths) == {2, 3, 4, 5, 6, 7, 8}
    assert all(text.startswith(query.text) for query in cut)
    assert [(query.id, query.columns) for query in cut] == [(query.id, query.columns) for query in queries]


def test_a_cut_inside_a_character_leaves_no_broken_one_and_a_short_text_stays_whole() -> None:
    assert truncate_queries([Query(0, "Fun")], tokenizer(), 8, 8)[0].text == "Fun"
    (cut,) = truncate_queries([Query(0, "A film 😀😀")], tokenizer(), 4, 4)
    assert cut.text.startswith("A film") and "A film 😀".startswith(cut.text.rstrip())
    (first,) = truncate_queries([Query(0, "😀 is how I felt")], tokenizer(), 1, 1)
    assert first.text == "😀"
