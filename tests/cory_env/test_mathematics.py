"""The task math: its data, and its reward against answers in many notations."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cory_env.rewarding.worker import RewardWorker
from cory_env.rewards.mathematics import gold_text
from cory_env.tasks import DataError, Task, make_task
from tests.cory_env.sample_tasks import LENGTH, tokenizer, validate

SPEC = "cory_env.rewards.mathematics:same_value"
MATH = [
    {
        "problem": r"What is $\frac{1}{4} + \frac{1}{4}$?",
        "level": "Level 1",
        "type": "Algebra",
        "solution": r"The sum is $\frac{2}{4} = \boxed{\frac{1}{2}}$.",
    },
    {"problem": "Solve $x^2 = 4$.", "solution": r"Take roots: $\boxed{\{-2, 2\}}$. So \boxed{-2, 2}."},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def worker() -> Iterator[RewardWorker]:
    pytest.importorskip("math_verify", reason="the extra math is not installed")
    with RewardWorker(SPEC, timeout=15) as worker:
        worker.rewards(["?"], ["1"], {"answer": ["5"]})  # imports sympy, which takes a while
        yield worker


def compute_rewards(worker: RewardWorker, answers: list[str], gold: str) -> list[float | None]:
    return worker.rewards(["?"] * len(answers), answers, {"answer": [gold] * len(answers)})


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        (
            r"\frac{1}{2}",
            ["$0.5$", r"\boxed{1/2}", r"So $x = \frac12$.", r"$\boxed{\dfrac{2}{4}}$"],
            ["", "1", "$0.51$"],
        ),
        ("1000", [r"\boxed{1,000}", "It costs $1,000.", "1000.", r"\boxed{10^3}"], [r"\boxed{1}", "100"]),
        ("50\\%", [r"\boxed{50\%}", r"\boxed{0.5}", r"\boxed{50}"], [r"\boxed{5}"]),
        ("18", [r"$\boxed{18 \text{ dollars}}$", "The answer is 18.", r"\boxed{18.00}"], [r"\boxed{-18}", "None"]),
        (r"2\sqrt{3}", [r"\boxed{\sqrt{12}}", r"$2 \cdot 3^{1/2}$"], [r"\boxed{3.46}"]),
        (r"x^2 - 1", [r"\boxed{(x-1)(x+1)}"], [r"\boxed{x^2}"]),
        (r"2.5 \times 10^{-3}", [r"\boxed{0.0025}"], [r"\boxed{0.025}"]),
        ("Ann has 4.\n#### 4", ["4", "So she has $4$."], ["5"]),
        (r"Hence $\boxed{\{-2, 2\}}$", [r"\boxed{\{2, -2\}}"], [r"\boxed{2}"]),
    ],
)
def test_answers_are_compared_by_value(gold: str, right: list[str], wrong: list[str], worker: RewardWorker) -> None:
    assert compute_rewards(worker, [*right, *wrong], gold) == [1.0] * len(right) + [0.0] * len(wrong)


def test_slow_comparisons_are_wrong_and_keep_the_time_limit_of_a_call(worker: RewardWorker) -> None:
    towers = [r"\boxed{9^{9^{9^9}}}", r"\boxed{10^{10^{10^{10}}}}"] * 3
    started = time.monotonic()
    assert compute_rewards(worker, [*towers, "5"], "5") == [0.0] * 6 + [1.0]
    assert time.monotonic() - started < 15


def test_rows_of_math_and_gsm8k_have_right_gold_answers(tmp_path: Path) -> None:
    pytest.importorskip("math_verify", reason="the extra math is not installed")
    gsm8k = [{"question": "2 + 2?", "answer": "2 + 2 = 4\n#### 4"}, {"question": "3 + 4?", "answer": "#### 7"}]
    task = make_task(
        "math", data=write(tmp_path / "math.jsonl", MATH), eval_data=write(tmp_path / "gsm8k.jsonl", gsm8k)
    )
    assert [task.gold(query) for query in task.train] == [r"\boxed{\frac{1}{2}}", r"\boxed{-2, 2}"]
    assert "final answer in \\boxed{}." in task.prompt(task.train[0])
    assert "\n\n\\boxed{1}\n\nReason" in task.observer_prompt(task.train[0], [" \\boxed{1}\n"])
    report = validate(task, tokenizer(), max_prompt_tokens=None, max_response_tokens=64)
    assert report.ok, str(report)
    assert "train: 2 of 2 gold answers score 1.0" in report.facts


def test_the_source_may_name_the_query_column(tmp_path: Path) -> None:
    rows = [{"task": f"{n} + 1", "solution": f"It is \\boxed{{{n + 1}}}."} for n in range(3)]
    data = write(tmp_path / "data.jsonl", rows)
    task = make_task("math", data=f"{data}?query_column=task")
    assert [(query.text, task.gold(query)) for query in task.train] == [
        ("0 + 1", "\\boxed{1}"),
        ("1 + 1", "\\boxed{2}"),
    ]
    with pytest.raises(DataError, match=r"line 1 has no column 'query' \(it has task, solution\)"):
        make_task("math", data=data)


def test_missing_data_is_reported(tmp_path: Path) -> None:
    def task(rows: list[dict[str, Any]], **settings: Any) -> Task:
        return make_task("math", data=write(tmp_path / "data.jsonl", rows), **settings)

    with pytest.raises(ValueError, match="task math requires data"):
        make_task("math")
    with pytest.raises(DataError, match=r"query 'Solve \$x\^2 = 4\$\.': the solution has no answer in"):
        task([*MATH, MATH[1] | {"solution": "Easy."}])
    with pytest.raises(DataError, match="The answer '#### ' is empty"):
        task([{"query": "a", "answer": "#### "}, {"query": "b", "answer": "1"}])
    for missing in ({}, {"answer": None}, {"answer": float("nan")}):
        with pytest.raises(DataError, match="line 1 has no value in column 'answer'"):
            task([{"query": "a", **missing}, {"query": "b"}])
    message = r"query 'Roots\?': The answer \['2', '3'\] must be a text, a finite number, or a list with one of these"
    with pytest.raises(DataError, match=message):
        task([{"query": "a", "answer": "1"}, {"query": "Roots?", "answer": ["2", "3"]}])
    with pytest.raises(DataError, match=r"query 'a': The answer \{'x': 1\} must be a text"):
        task([{"query": "a", "solution": {"x": 1}}, MATH[1] | {"query": "b"}])
    plain = task([{"query": "a"}, {"query": "b"}], reward=LENGTH)
    assert plain.gold(plain.train[0]) is None and plain.solved_at is None


def test_the_gold_answer_is_the_last_boxed_expression() -> None:
    assert gold_text(r"\boxed{1} and \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert gold_text(" 3 ") == "3" and gold_text(3) == "3"
    for wrong in ("", r"\boxed{", r"\boxed{}"):
        with pytest.raises(ValueError, match="is empty"):
            gold_text(wrong)
