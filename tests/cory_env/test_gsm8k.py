"""The task gsm8k: its prompts, data and reward, also on the real data if available."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from cory_env.rewards.answer import last_is_right
from cory_env.tasks import TASKS, DataError, Query, Task, make_task
from cory_env.tasks.rows import parse_source
from tests.cory_env.sample_tasks import LENGTH, tokenizer, validate

REAL_DATA = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
ROWS = [
    {"question": "Ann has 2 cats and gets 2 more. How many has she?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
    {"question": "Ben has $1,500 and gets $500. How much has he?", "answer": "1500 + 500 = 2000\n#### 2,000"},
    {"question": "It is 2 degrees and gets 5 colder. How warm is it?", "answer": "2 - 5 = -3\n#### -3"},
]


def write(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def task(tmp_path: Path) -> Task:
    data = write(tmp_path / "rows.jsonl", ROWS)
    return make_task("gsm8k", data=data, eval_data=data)


def test_the_observer_s_prompt_has_the_reference_between_question_and_answer(task: Task) -> None:
    query = task.train[0]
    question = "Question: Ann has 2 cats and gets 2 more. How many has she?"
    example, prompt = task.prompt(query).split("Question: ")[1:]
    assert "Answer:" in example and last_is_right([example], ["768"]) == [1.0]
    assert f"Question: {prompt}" == f"{question} Answer:"
    later = task.observer_prompt(query, [" It is 3.\n"])
    assert later == task.prompt(query).replace(
        " more. How many has she?", " more. How many has she? Reference: It is 3."
    )
    assert task.observer_prompt(query, [" 3", " 4"]).endswith(f"{question} Reference: 3 Reference: 4 Answer:")


def test_gold_answers_are_canonical_numbers(task: Task) -> None:
    assert [task.gold(query) for query in task.train] == ["4", "2000", "-3"]
    assert task.solved_at == 1.0


def test_a_custom_reward_requires_no_answers_and_has_no_gold_answers(tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", [{"question": "Why?"}, {"question": "How?"}])
    task = make_task("gsm8k", data=data, reward=LENGTH)
    assert task.gold(task.train[0]) is None and task.solved_at is None
    with pytest.raises(
        DataError, match="line 1 has no value in column 'answer', which the prompts or the reward require"
    ):
        make_task("gsm8k", data=data)


def test_rewards_of_the_task_s_module_keep_gold_answers_and_sums_do_not(tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", ROWS)
    other = make_task("gsm8k", data=data, reward="cory_env.rewards.answer:first_line_is_right")
    assert other.gold(other.train[0]) == "4" and other.solved_at == 1.0
    weighted = make_task("gsm8k", data=data, reward=f"1.0 * cory_env.rewards.answer:last_is_right + 0.1 * {LENGTH}")
    assert weighted.gold(weighted.train[0]) is None and weighted.solved_at is None


def test_an_answer_without_a_number_is_reported(tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", [*ROWS, {"question": "Who?", "answer": "2 men\n#### Ann"}])
    with pytest.raises(DataError, match=r"task gsm8k, query 'Who\?': The answer '2 men\\n#### Ann' has no number"):
        make_task("gsm8k", data=data)


@pytest.mark.parametrize("name", ["gsm8k", "arithmetic", "drafts"])
def test_a_row_with_several_answers_is_reported(tmp_path: Path, name: str) -> None:
    column = "question" if name == "gsm8k" else "query"
    data = write(tmp_path / "rows.jsonl", [{column: "1+1", "answer": 2}, {column: "x?", "answer": [2, 3]}])
    with pytest.raises(
        DataError, match=rf"task {name}, query 'x\?': The answer \[2, 3\] must be a text, a finite number"
    ):
        make_task(name, data=data)


def test_without_data_the_splits_come_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [str(source) for source in TASKS["gsm8k"].sources]
    assert parse_source(sources[1]) == ("hub:openai/gsm8k", {"config": "main", "split": "test"})
    pytest.importorskip("datasets", reason="the extra hub is not installed")
    from datasets import config

    config.HF_DATASETS_CACHE = tmp_path / "cache"
    hub = tmp_path / "gsm8k"  # same layout as on the hub
    (hub / "main").mkdir(parents=True)
    files = "".join(f"  - split: {split}\n    path: main/{split}-*\n" for split in ("train", "test"))
    (hub / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")
    for split, rows in (("train", ROWS[:2]), ("test", ROWS[2:])):
        parquet.write_table(pyarrow.Table.from_pylist(rows), hub / "main" / f"{split}-00000-of-00001.parquet")
    train, test = (source.replace("openai/gsm8k", str(hub)) for source in sources)
    monkeypatch.setitem(TASKS, "gsm8k", replace(TASKS["gsm8k"], sources=(train, test)))
    task = make_task("gsm8k")
    assert [query.text for query in task.train] == [row["question"] for row in ROWS[:2]]
    assert task.test == [Query(0, ROWS[2]["question"], {"answer": ROWS[2]["answer"]})]


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="GSM8K is not available")
def test_real_solutions_are_right_and_the_next_ones_only_if_the_numbers_agree() -> None:
    task = make_task("gsm8k", data=REAL_DATA / "train.jsonl", eval_data=REAL_DATA / "test.jsonl")
    for split, count in ((task.train, 7473), (task.test, 1319)):
        solutions = [str(query.columns["answer"]) for query in split]
        numbers = [int(solution.split("#### ")[1].replace(",", "")) for solution in solutions]
        assert last_is_right(solutions, solutions) == [1.0] * count
        agree = [float(a == b) for a, b in zip(numbers, numbers[1:] + numbers[:1], strict=True)]
        assert last_is_right(solutions[1:] + solutions[:1], solutions) == agree
        assert 0 < sum(agree) < 0.02 * count


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="GSM8K is not available")
def test_the_real_data_is_valid() -> None:
    report = validate(make_task("gsm8k", data=REAL_DATA / "test.jsonl"), tokenizer(), max_prompt_tokens=None)
    assert report.ok and not report.warnings
    assert {"train: 1188 of 1188 gold answers score 1.0", "test: 131 of 131 gold answers score 1.0"} < {*report.facts}
