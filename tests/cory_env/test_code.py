"""The task code: the bundled problems, the published forms of others, and its rewards."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cory_env.rewarding.worker import RewardError, RewardWorker
from cory_env.rewards.code import all_passed, close_prefix, extract_program, share_passed
from cory_env.sandbox.machine import SandboxError, require_sandbox
from cory_env.tasks import DataError, Task, make_task
from cory_env.validate import validate
from tests.cory_env.sample_tasks import LENGTH, tokenizer


def sandbox() -> str:
    """The setting that this machine allows."""
    try:
        require_sandbox()
    except SandboxError:
        return "off"
    return "required"


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def paid(task: Task, completions: list[str]) -> list[float]:
    """The share of tests that completions to the first queries of a task pass."""
    columns = [query.columns for query in task.train[: len(completions)]]
    named = {name: [of.get(name) for of in columns] for name in ("tests", "setup", "prefix", "entry")}
    return share_passed(completions, **named, sandbox=sandbox())  # type: ignore[arg-type]


def golds(task: Task) -> list[str]:
    found = [task.gold(query) for query in task.train]
    assert None not in found
    return [str(gold) for gold in found]


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_bundled_solutions_pass_all_their_tests_and_not_those_of_the_next_problem(step: int) -> None:
    task = make_task("code", reward=f"cory_env.rewards.code:share_passed?sandbox={sandbox()}")
    assert (len(task.train), len(task.test)) == (66, 18)
    splits = {
        split: [replace(query, id=number) for number, query in enumerate(task.queries(split)[::step])]
        for split in task.splits
    }
    part = replace(task, train=splits["train"], test=splits["test"])
    report = validate(part, tokenizer(), max_prompt_tokens=None, max_response_tokens=512, reward_timeout=240)
    assert report.ok and not report.warnings, str(report)
    for split, queries in splits.items():
        count = len(queries)
        assert f"{split}: {count} of {count} gold answers score 1.0" in report.facts
        assert f"{split}: 0 of {count} wrong answers, those of the next query, score 1.0" in report.facts


def test_tests_stay_out_of_the_prompts() -> None:
    task = make_task("code")
    for query in task.all_queries():
        shown = task.prompt(query) + task.observer_prompt(query, [" ```python\nx\n```\n", "y"])
        assert "assert" not in shown and query.text in shown
    assert "wrong:\n\n```python\nx\n```\n\nAnother one:\n\ny\n\nAnswer" in shown


MBPP = {
    "task_id": 2,
    "text": "Write a function to find the shared elements from the given two lists.",
    "code": "def similar_elements(test_tup1, test_tup2):\r\n  return tuple(set(test_tup1) & set(test_tup2)) ",
    "test_list": [
        "assert set(similar_elements((3, 4, 5, 6),(5, 7, 4, 10))) == set((4, 5))",
        "assert set(similar_elements((1, 2, 3, 4),(5, 4, 3, 7))) == set((3, 4))",
    ],
    "test_setup_code": "",
    "challenge_test_list": [],
}
MBPP_WITH_SETUP = MBPP | {
    "text": "Write a function to count the nodes of a list.",
    "code": (
        "class Node:\n  def __init__(self, x): self.x, self.next = x, None\n"
        "def nodes(n):\n  return 1 + nodes(n.next) if n else 0"
    ),
    "test_list": ["assert nodes(root) == 2", "assert nodes(root.next) == 1"],
    "test_setup_code": "root = Node(1)\r\nroot.next = Node(2)",
}
SANITIZED = {
    "source_file": "Benchmark Questions Verification V2.ipynb",
    "task_id": 98,
    "prompt": "Write a function to find the volume of a cone.",
    "code": "import math\ndef volume_cone(r,h):\n  return (1.0/3) * math.pi * r * r * h",
    "test_imports": ["import math"],
    "test_list": ["assert math.isclose(volume_cone(5,12), 314.15926535897927, rel_tol=0.001)"],
}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": (
        "from typing import List\n\n\ndef shift(x: int) -> int:\n    return x + 1\n\n\n"
        'def close(numbers: List[float], limit: float) -> bool:\n    """ Are two numbers closer than limit?\n'
        '    >>> close([1.0, 2.0], 0.5)\n    False\n    """\n'
    ),
    "entry_point": "close",
    "canonical_solution": (
        "    for i, a in enumerate(numbers):\n        for b in numbers[:i]:\n"
        "            if abs(a - b) < limit:\n                return True\n\n    return False\n"
    ),
    "test": (
        "\n\nMETADATA = {\n    'author': 'jt'\n}\n\n\ndef check(candidate):\n"
        "    assert candidate([1.0, 2.0, 3.9, 4.0], 0.3) == True\n    assert candidate([1.0, 2.0, 4.0], 0.3) == False\n"
        "    assert shift(1) == 2, 'a helper of the prompt'\n    assert True, 'This prints if this assert fails'\n\n"
    ),
}
HUMANEVAL_PLUS = HUMANEVAL | {
    "test": (
        "import numpy as np\n\ndef assertion(out, exp, atol):\n"
        "    if atol:\n        assert np.allclose(out, exp, atol=atol)\n    else:\n        assert out == exp\n\n"
        "def check(candidate):\n    inputs = [[[1.0, 2.0], 0.5], [[1.0, 1.1], 0.5]]\n"
        "    results = [False, True]\n    for i, (inp, exp) in enumerate(zip(inputs, results)):\n"
        "        assertion(candidate(*inp), exp, 0)\n"
    )
}
APPS = {
    "problem_id": 0,
    "question": "Print the sum of the numbers of each of t lines.",
    "solutions": json.dumps(["for _ in range(int(input())):\n    print(sum(map(float, input().split())))\n"]),
    "input_output": json.dumps({"inputs": ["2\n1 2\n3 4\n", ["1", "0.1 0.2"]], "outputs": ["3.0\n7.0\n", ["0.3"]]}),
    "difficulty": "interview",
    "url": "",
    "starter_code": "",
}
APPS_CALLED = APPS | {
    "question": "Add two numbers.",
    "solutions": json.dumps(["class Solution:\n    def add(self, a, b):\n        return (a + b, a)"]),
    "input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2], [0, 5]], "outputs": [[3, 1], [[5, 0]]]}),
    "starter_code": "\nclass Solution:\n    def add(self, a: int, b: int):\n",
}


@pytest.mark.parametrize(
    ("row", "asks"),
    [
        (MBPP, "two lists.\nIt is called like this: similar_elements((3, 4, 5, 6), (5, 7, 4, 10))"),
        (MBPP_WITH_SETUP, "a list.\nIt is called like this: nodes(root)"),
        (SANITIZED, "a cone.\nIt is called like this: volume_cone(5, 12)"),
        (HUMANEVAL, HUMANEVAL["prompt"]),
        (HUMANEVAL_PLUS, HUMANEVAL["prompt"]),
        (APPS, "t lines.\n\nThe program reads standard input and prints."),
        (APPS_CALLED, "numbers.\n\nGo on with this code:\n\nclass Solution:\n    def add(self, a: int, b: int):"),
    ],
)
def test_rows_of_published_data_are_problems_whose_solutions_pass(
    row: dict[str, Any], asks: str, tmp_path: Path
) -> None:
    data = write(tmp_path / "data.jsonl", row)
    task = make_task("code", data=data, eval_data=data)
    assert task.train[0].text.endswith(asks)
    assert paid(task, golds(task)) == [1.0]
    assert paid(
        task, ["def similar_elements(a, b): return set()\ndef close(*_): return 2\ndef volume_cone(*_): return 0"]
    )[0] == (1 / 3 if row is HUMANEVAL else 0.0)  # which also tests a helper that the prompt brings


def test_of_a_humaneval_problem_each_assertion_is_a_test_and_a_completion_may_go_on_or_begin_anew(
    tmp_path: Path,
) -> None:
    data = write(tmp_path / "data.jsonl", HUMANEVAL)
    task = make_task("code", data=data, eval_data=data)
    assert len(task.train[0].columns["tests"]) == 3  # type: ignore[arg-type]
    anew = "Here:\n```python\ndef close(numbers, limit):\n    return len(numbers) == shift(3)\n```\nThat is all."
    forged = "    return 0\n\ndef shift(x):\n    return 9\n"  # ends before what is at the margin
    assert [paid(task, [text])[0] for text in (anew, "    return True\n", forged)] == [1.0, 2 / 3, 2 / 3]


def test_a_file_of_each_form_goes_with_held_out_data_of_another(tmp_path: Path) -> None:
    task = make_task(
        "code",
        data=write(tmp_path / "a.jsonl", MBPP, SANITIZED | {"text": "x"}),
        eval_data=write(tmp_path / "b.jsonl", HUMANEVAL),
    )
    assert len(task.train) == 2 and task.test[0].columns["entry"] == "close"


def test_data_that_cannot_be_tested_is_named_by_row(tmp_path: Path) -> None:
    own = {"query": "Add.", "tests": ["assert add(1, 2) == 3"]}
    for bad, message in (
        ({"tests": []}, r"at 'Add.': its tests are \[\], but must be code"),
        (
            {"tests": ["assert add(1, 1) == 2", None]},
            r"its tests are \['assert add\(1, 1\) == 2', None\], but must be code",
        ),
        ({"tests": ["assert add(1, 1) == 2"], "solution": ["a"]}, r"its solution \['a'\] is no text"),
        ({"tests": ["assert add(1"]}, r"the test 'assert add\(1' is not Python"),
        ({"tests": None}, "line 2 has no value in column 'tests'"),
    ):
        with pytest.raises(DataError, match=message):
            make_task("code", data=write(tmp_path / "data.jsonl", own, own | bad, own))
    with pytest.raises(DataError, match="input_output is not JSON"):
        make_task("code", data=write(tmp_path / "data.jsonl", APPS | {"input_output": "{"}, APPS))
    task = make_task("code", data=write(tmp_path / "data.jsonl", {"query": "a"}, {"query": "b"}), reward=LENGTH)
    assert task.gold(task.train[0]) is None and task.solved_at is None


def test_a_row_with_a_single_test_as_text_and_a_conversation_s_answer_are_taken() -> None:
    answer: Any = [{"role": "assistant", "content": "```\ndef f(): return 1\n```"}]
    assert share_passed([answer], ["assert f() == 1"], sandbox=sandbox()) == [1.0]
    assert all_passed(
        [answer] * 2, [["assert f() == 1"], ["assert f() == 1", "assert f() == 2"]], sandbox=sandbox()
    ) == [
        1.0,
        0.0,
    ]


def test_the_program_in_a_completion_is_its_first_block_or_all_of_it() -> None:
    assert extract_program("x = 1") == "x = 1"
    assert extract_program("So:\n```python\nx = 1\n```\nor\n```\nx = 2\n```") == "x = 1\n"
    assert extract_program("```py\nx = 1\ny") == "x = 1\ny"
    assert close_prefix("def f(x):\n").endswith("pass\n") and close_prefix("import os\n") == "import os\n"
    assert close_prefix("def (") == ""


def test_settings_stand_in_the_reward_s_name_and_what_is_wrong_with_them_is_told_at_the_start() -> None:
    slow = "import time\ndef f(): time.sleep(30); return 1"
    with RewardWorker(f"cory_env.rewards.code:all_passed?sandbox={sandbox()}&seconds=5", timeout=60) as worker:
        assert worker.rewards(["?"] * 2, [slow, slow.replace("30", "0")], {"tests": [["assert f() == 1"]] * 2}) == [
            0.0,
            1.0,
        ]
    for setting, message in (
        ("sandbox=on", "must be required or off"),
        ("memory=1", "at least 64"),
        ("seconds=x", "float"),
    ):
        worker = RewardWorker(f"cory_env.rewards.code:share_passed?{setting}", timeout=60)
        with worker, pytest.raises(RewardError, match=f"cannot be used.*{message}"):
            worker.start()


def test_programs_that_hang_all_end_within_the_time_limit_of_a_call() -> None:
    with RewardWorker(f"cory_env.rewards.code:share_passed?sandbox={sandbox()}&seconds=60", timeout=8) as worker:
        count = 6
        rewards = worker.rewards(["?"] * count, ["while True: pass"] * count, {"tests": [["assert f() == 1"]] * count})
    assert rewards == [0.0] * count
