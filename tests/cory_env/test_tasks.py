"""Tasks by name, their data files and their templates."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cory_env.tasks import DataError, Query, Task, TaskSettings, TemplateError, make_task, tasks_reused

REWARD = "tests.cory_env.sample_rewards:length"


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_imdb_has_two_splits_the_paper_s_prompts_and_the_sentiment_reward() -> None:
    task = make_task("imdb")
    assert len(task.train) > len(task.test) > 0
    query = Query(0, "This movie")
    assert task.prompt(query) == "This movie"
    assert (
        task.observer_prompt(query, [" is bad"])
        == 'I can make this sentence "This movie is bad" more positive: This movie'
    )
    assert task.observer_prompt(query, [" is bad", " is ok"]) == (
        'I can make this sentence "This movie is bad" and this sentence "This movie is ok" more positive: This movie'
    )
    assert task.reward == "cory_env.rewards.sentiment:positive_logit"
    assert task.gold(query) is None and task.solved_at is None


@pytest.mark.parametrize("split", ["train", "test"])
def test_queries_are_numbered_within_their_split(split: str) -> None:
    queries = make_task("imdb").queries(split)  # type: ignore[arg-type]
    assert [query.id for query in queries] == list(range(len(queries)))


def test_an_unknown_task_or_split_is_reported_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"Unknown task 'costum'.* one of arithmetic, code, custom, .*imdb"):
        make_task("costum")
    with pytest.raises(ValueError, match="Use one of: train, validation, test"):
        make_task("imdb").queries("valid")  # type: ignore[arg-type]


def test_a_custom_task_uses_the_user_s_queries_columns_and_templates(tmp_path: Path) -> None:
    data = write(tmp_path / "sums.jsonl", [{"query": f"{i} + {i}", "answer": 2 * i, "unit": "cm"} for i in range(20)])
    task = make_task(
        "custom",
        data=data,
        reward=REWARD,
        prompt="How much is {query} in {unit}? {{short}}",
        observer_prompt="Someone said {reference} to {query} in {unit}.",
    )
    query = task.train[2]
    assert (query.text, query.columns) == ("3 + 3", {"answer": 6, "unit": "cm"})
    assert task.prompt(query) == "How much is 3 + 3 in cm? {short}"
    assert task.observer_prompt(query, ["{6}"]) == "Someone said {6} to 3 + 3 in cm."
    assert task.observer_prompt(query, ["6", "7"]) == "Someone said 6\n7 to 3 + 3 in cm."


def test_by_default_the_observer_sees_the_pioneer_s_prompt_after_the_reference(tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", [{"query": "a"}, {"query": "b"}])
    task = make_task("custom", data=data, reward=REWARD, prompt="Q: {query}\nA:")
    assert task.observer_prompt(task.train[0], ["yes"]) == "Reference: yes\nQ: a\nA:"


def test_rows_are_held_out_unless_eval_data_is_set(tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", [{"query": f"q{i}"} for i in range(1, 31)])
    task = make_task("custom", data=data, reward=REWARD)
    shows_feedback = {
        "observer_prompt": "{query} {reference} {feedback}"
    }  # kept by a single agent, which has no feedback
    assert len(make_task("custom", data=data, reward=REWARD, **shows_feedback).train) == len(task.train)
    assert [query.text for query in task.test] == [f"q{i}" for i in range(3, 31, 3)]
    assert len(task.train) == 20 and [query.id for query in task.train] == list(range(20))
    held_out = write(tmp_path / "held_out.jsonl", [{"query": "other"}])
    both = make_task("custom", data=data, eval_data=held_out, reward=REWARD)
    assert len(both.train) == 30 and [query.text for query in both.test] == ["other"]


def test_validation_and_test_are_disjoint_and_training_keeps_its_rows(
    tmp_path: Path,
) -> None:
    data = write(tmp_path / "rows.jsonl", [{"query": f"q{i}"} for i in range(1, 401)])
    unsplit = make_task("custom", data=data, reward=REWARD)
    assert unsplit.queries("validation") == unsplit.test and unsplit.splits == ("train", "test")

    def texts(task: Task) -> tuple[list[str], list[str]]:
        assert task.train == unsplit.train
        for split in (task.queries("validation"), task.test):
            assert [query.id for query in split] == list(range(len(split)))
        return [query.text for query in task.queries("validation")], [query.text for query in task.test]

    one_file = make_task("custom", data=data, reward=REWARD, validation=128)
    assert texts(one_file) == ([f"q{i}" for i in range(10, 401, 20)], [f"q{i}" for i in range(20, 401, 20)])
    few = make_task("custom", data=data, reward=REWARD, validation=2)
    assert texts(few) == (["q10", "q30"], ["q20", *(f"q{i}" for i in range(40, 401, 10))])
    two_files = make_task("custom", data=data, eval_data=data, reward=REWARD, validation=3)
    assert [query.text for query in two_files.queries("validation")] == ["q1", "q2", "q3"]
    assert len(two_files.test) == 397 and two_files.splits == ("train", "validation", "test")


def test_imdb_validation_queries_are_the_first_held_out_ones() -> None:
    unsplit, task = make_task("imdb"), make_task("imdb", validation=128)
    assert task.train == unsplit.train
    assert list(task.queries("validation")) == list(unsplit.test[:128])
    assert [query.text for query in task.test] == [query.text for query in unsplit.test[128:]] and len(task.test) == 372


def test_fewer_than_ten_rows_hold_out_the_last_one_and_a_single_row_is_rejected(tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", [{"query": f"q{i}"} for i in range(1, 4)])
    task = make_task("custom", data=data, reward=REWARD)
    assert [query.text for query in task.train] == ["q1", "q2"] and [query.text for query in task.test] == ["q3"]
    with pytest.raises(DataError, match=r"only one row.*eval_data"):
        make_task("custom", data=write(data, [{"query": "q"}]), reward=REWARD)


@pytest.mark.parametrize(
    ("rows", "held_out"), [(4, 1), (60, 20), (119, 39), (120, 40), (200, 40), (399, 44), (400, 40), (1000, 100)]
)
def test_of_few_rows_more_than_every_tenth_is_held_out(tmp_path: Path, rows: int, held_out: int) -> None:
    data = write(tmp_path / "rows.jsonl", [{"query": f"q{i}"} for i in range(rows)])
    task = make_task("custom", data=data, reward=REWARD)
    assert (len(task.test), len(task.train)) == (held_out, rows - held_out)


def test_imdb_supports_user_data(tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", [{"query": "The book"}, {"query": "The play"}])
    assert [query.text for query in make_task("imdb", data=data).train] == ["The book"]
    only_eval = make_task("imdb", eval_data=data)
    assert len(only_eval.test) == 2 and only_eval.train == make_task("imdb").train


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rows"),
        ("\n", "has no rows"),
        ('{"query": "a"}\n\n{"query": "b"}\n', "line 2 is not valid JSON"),
        ('{"query": "a"}\n{"query": \n', "line 2 is not valid JSON"),
        ('{"query": "a"}\n["b"]\n', "line 2 is a JSON list, but must be an object"),
        ('{"query": "a"}\n{"question": "b"}\n', "line 2 has no column 'query' .it has question."),
        ('{"query": " "}\n', "line 1: 'query' is ' ', but must be non-empty text"),
        ('{"query": "\\u200b \\ufeff\\u00ad"}\n', r"line 1: 'query' is '\\u200b .*', but must be non-empty text"),
        ('{"query": 5}\n', "line 1: 'query' is 5, but must be non-empty text"),
        ('{"query": "a"}\n{"query": "b", "answer": 1, "answer": 2}\n', "line 2 repeats the name 'answer'"),
        ('{"query": "a"}\n{"query": "b", "of": {"x": 1, "x": 2}}\n', "line 2 repeats the name 'x'"),
        ('{"query": "a"}\n{"query": "b \\ud83d"}\n', "line 2 contains half of a surrogate pair"),
        ('{"query": "a"}\n{"que\\ud83dry": "b"}\n', "line 2 contains half of a surrogate pair"),
        (
            '{"query": "a"}\n{"query": "b", "of": ' + "[" * 100_000 + "\n",
            "line 2 is not valid JSON: .* recursion",
        ),
        ('{"query": "a"}\n{"query": "b", "of": ' + "9" * 10_000 + "}\n", "line 2 is not valid JSON: Exceeds"),
        ('{"query": "a", "role": "x"}\n', "line 1: the column 'role' conflicts"),
        ('{"query": "a", "unit": "cm"}\n{"query": "b", "unit": null}\n', "line 2 has no value in column 'unit'"),
    ],
)
def test_a_malformed_file_is_reported_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(text)
    with pytest.raises(DataError, match=f"rows.jsonl {message}"):
        make_task("custom", data=data, reward=REWARD, prompt="{query} {unit}" if "unit" in text else None)


def test_invalid_utf8_is_reported_with_its_line(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_bytes(b'{"query": "a"}\n{"query": "\xff"}\n')
    with pytest.raises(DataError, match="line 2 is not UTF-8"):
        make_task("custom", data=data, reward=REWARD)


def test_a_surrogate_pair_is_decoded(tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", [{"query": "a 😀"}, {"query": "b"}])
    assert "\\ud83d\\ude00" in data.read_text()
    assert make_task("custom", data=data, reward=REWARD).train[0].text == "a 😀"


def test_a_byte_order_mark_and_windows_line_ends_are_supported(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_bytes(b'\xef\xbb\xbf{"query": "a"}\r\n{"query": "b"}\r\n')
    task = make_task("custom", data=data, reward=REWARD)
    assert [query.text for query in (*task.train, *task.test)] == ["a", "b"]


def test_a_missing_file_and_an_unknown_format_are_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Data file .*none.jsonl not found in"):
        make_task("custom", data=tmp_path / "none.jsonl", reward=REWARD)
    (tmp_path / "rows.xml").touch()
    with pytest.raises(DataError, match=r"ends in .jsonl"):
        make_task("custom", data=tmp_path / "rows.xml", reward=REWARD)


def test_a_custom_task_requires_data_and_a_reward(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"requires data\. Set data"):
        make_task("custom", reward=REWARD)
    with pytest.raises(ValueError, match=r"requires a reward\. Set reward"):
        make_task("custom", data=tmp_path / "rows.jsonl")


def test_task_settings_reject_conflicts() -> None:
    settings = TaskSettings("arithmetic?digits=1&operations=sums", validation=2)
    task = make_task(settings)
    assert task.train == make_task("arithmetic?digits=1&operations=sums").train and task.name == "arithmetic"
    assert len(task.queries("validation")) == 2
    with pytest.raises(
        ValueError, match=r"min_query_tokens=3 conflicts with max_query_tokens=None\. Set max_query_tokens to 3 or more"
    ):
        replace(settings, min_query_tokens=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'digit'"):
        make_task("arithmetic", digit=1)


@pytest.mark.parametrize(
    ("templates", "message"),
    [
        ({"prompt": "Answer:"}, "prompt of task custom lacks {query}"),
        ({"observer_prompt": "{query}"}, "observer_prompt of task custom lacks {reference}"),
        ({"observer_prompt": "nothing"}, "lacks {query}, {reference}"),
        ({"prompt": "{query"}, "is not valid"),
        ({"prompt": "{query} {}"}, "not a plain column name"),
        ({"prompt": "{query.upper}"}, "not a plain column name"),
        ({"prompt": "{query!r}"}, "not a plain column name"),
    ],
)
def test_an_invalid_template_is_rejected(tmp_path: Path, templates: dict[str, str], message: str) -> None:
    data = write(tmp_path / "rows.jsonl", [{"query": "a"}, {"query": "b"}])
    with pytest.raises(TemplateError, match=message):
        make_task("custom", data=data, reward=REWARD, **templates)


def test_a_template_column_missing_in_a_query_is_reported() -> None:
    task = Task(name="x", train=[], test=[], reward=REWARD, prompt_template="{query} {unit}")
    with pytest.raises(TemplateError, match=r"uses the column 'unit'.*only query"):
        task.prompt(Query(0, "a"))


CUSTOM_TASK = """
from cory_env.tasks import Query, Task

def make(data=None, reward="tests.cory_env.sample_rewards:length", held_out="1"):
    texts = [f"{data or 'Say'} {n}" for n in range(5)]
    queries = [Query(n, text) for n, text in enumerate(texts)]
    return Task(name="custom", train=queries, test=queries[: int(held_out)], reward=reward)

def nothing():
    return None

def about(topic):
    return make(topic)

def cut():
    return make("Half an emoji \\ud83d")
"""


def test_a_user_s_task_is_named_by_its_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_package").mkdir()
    (tmp_path / "user_package" / "sayings.py").write_text(CUSTOM_TASK)
    monkeypatch.syspath_prepend(tmp_path)
    task = make_task("user_package.sayings:make?held_out=4", data="Tell", validation=2)
    assert [query.text for query in task.train] == [f"Tell {n}" for n in range(5)]
    assert (len(task.queries("validation")), len(task.test), task.reward) == (2, 2, REWARD)
    for name, settings, message in (
        ("make", {"prompt": "{query}!"}, "cannot be made: got an unexpected keyword argument 'prompt'"),
        ("nothing", {}, "returned a NoneType, not a cory_env.tasks.Task"),
        ("about", {}, r"missing a required argument: 'topic'\. .* data, .* user_package\.sayings:about\?setting=value"),
        ("make?topic=a", {}, r"cannot be made: .* user_package\.sayings:make\?setting=value"),
        (
            "cut",
            {},
            r"Query 0 of task user_package\.sayings:cut contains half of a surrogate pair.*'Half an emoji \\ud83d",
        ),
        ("none", {}, "has no function 'none'. Correct the task's name"),
    ):
        with pytest.raises(ValueError, match=message):
            make_task(f"user_package.sayings:{name}", **settings)


def test_checksums_are_the_same_in_every_process_even_for_sets() -> None:
    code = (
        "from cory_env.tasks import Query; "
        "print(Query(0, 'a', {'one': {'x', 'y', 'z'}, 'more': [{'k': frozenset('abc')}]}).checksum)"
    )
    checksums = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(checksums) == 1


def test_tasks_with_the_same_settings_are_built_once_within_the_context_only(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [{"query": "a"}, {"query": "b"}])
    settings = TaskSettings("custom", data=str(file), reward=REWARD)
    with tasks_reused():
        task = make_task(settings)
        assert make_task(replace(settings)) is task and make_task(replace(settings, prompt="{query}!")) is not task
        with tasks_reused():
            assert make_task(settings) is not task
        assert make_task(settings) is task
    write(file, [{"query": "c"}, {"query": "d"}])
    assert make_task(settings).train[0].text != task.train[0].text
