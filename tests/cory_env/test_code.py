"""The task code: the bundled problems, published data formats, and its rewards."""

import json
from pathlib import Path
from typing import Any

import pytest

from cory_env.rewarding.worker import RewardError, RewardWorker
from cory_env.rewards.code import all_passed, extract_program, share_passed
from cory_env.sandbox.machine import SandboxError, require_sandbox
from cory_env.tasks import DataError, Task, make_task
from tests.cory_env.sample_tasks import LENGTH


def sandbox() -> str:
    """The setting that this machine supports."""
    try:
        require_sandbox()
    except SandboxError:
        return "off"
    return "required"


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def compute_rewards(task: Task, completions: list[str]) -> list[float]:
    """The share of tests that completions of a task's first queries pass."""
    rows = [query.columns for query in task.train[: len(completions)]]
    columns = {name: [row.get(name) for row in rows] for name in ("tests", "setup", "entry")}
    return share_passed(completions, **columns, sandbox=sandbox())  # type: ignore[arg-type]


def gold_answers(task: Task) -> list[str]:
    answers = [task.gold(query) for query in task.train]
    assert None not in answers
    return [str(answer) for answer in answers]


@pytest.mark.parametrize("step", [15, pytest.param(1, marks=pytest.mark.slow)])
def test_bundled_solutions_pass_only_their_own_tests(step: int) -> None:
    task = make_task("code")
    assert (len(task.train), len(task.test)) == (66, 157)
    queries = [*task.all_queries()][::step]
    solutions = [str(task.gold(query)) for query in queries]
    others = solutions[1:] + solutions[:1]
    tests: Any = [query.columns["tests"] for query in queries]
    shares = share_passed([*solutions, *others], tests * 2, sandbox=sandbox(), seconds="30")
    assert shares[: len(queries)] == [1.0] * len(queries)
    assert max(shares[len(queries) :]) < 1.0


def test_prompts_do_not_contain_the_tests() -> None:
    task = make_task("code")
    for query in task.all_queries():
        prompts = task.prompt(query) + task.observer_prompt(query, [" ```python\nx\n```\n", "y"])
        assert "assert" not in prompts and query.text in prompts
    assert "wrong:\n\n```python\nx\n```\n\nAnother one:\n\ny\n\nAnswer" in prompts


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
    ("row", "prompt_end"),
    [
        (MBPP, "two lists.\nIt is called like this: similar_elements((3, 4, 5, 6), (5, 7, 4, 10))"),
        (MBPP_WITH_SETUP, "a list.\nIt is called like this: nodes(root)"),
        (SANITIZED, "a cone.\nIt is called like this: volume_cone(5, 12)"),
        (APPS, "t lines.\n\nThe program reads standard input and prints."),
        (APPS_CALLED, "numbers.\n\nGo on with this code:\n\nclass Solution:\n    def add(self, a: int, b: int):"),
    ],
)
def test_published_rows_become_problems_whose_solutions_pass(
    row: dict[str, Any], prompt_end: str, tmp_path: Path
) -> None:
    data = write(tmp_path / "data.jsonl", row)
    task = make_task("code", data=data, eval_data=data)
    assert task.train[0].text.endswith(prompt_end)
    assert compute_rewards(task, gold_answers(task)) == [1.0]
    wrong = "def similar_elements(a, b): return set()\ndef volume_cone(*_): return 0"
    assert compute_rewards(task, [wrong]) == [0.0]


def test_training_and_held_out_data_may_have_different_formats(tmp_path: Path) -> None:
    task = make_task(
        "code",
        data=write(tmp_path / "a.jsonl", MBPP, SANITIZED | {"text": "x"}),
        eval_data=write(tmp_path / "b.jsonl", APPS),
    )
    assert len(task.train) == 2 and task.test[0].text.startswith("Print the sum")


def test_invalid_problems_are_reported_by_row(tmp_path: Path) -> None:
    valid = {"query": "Add.", "tests": ["assert add(1, 2) == 3"]}
    for invalid, message in (
        ({"tests": []}, "query 'Add.': it has no tests"),
        ({"prefix": "def add(a, b):"}, "it has a column prefix, but a program must be complete"),
        ({"tests": ["assert add(1, 1) == 2", None]}, r"column tests contains \['assert .*', None\], but must be code"),
        ({"tests": ["assert add(1, 1) == 2"], "solution": ["a"]}, r"its solution \['a'\] is not text"),
        ({"tests": ["assert add(1"]}, r"the test 'assert add\(1' is not Python"),
        ({"tests": ["assert add(1)", "(" * 9999]}, r"the test '\(+' is not Python"),
        ({"tests": ["assert add(1)", "-" * 99999 + "1"]}, r"the test '-+' is not Python"),
        ({"setup": "import ("}, r"its setup 'import \(' is not Python"),
        ({"tests": None}, "line 2 has no value in column 'tests'"),
    ):
        with pytest.raises(DataError, match=message):
            make_task("code", data=write(tmp_path / "data.jsonl", valid, valid | invalid, valid))
    for column, message in (("test_list", "the test '.*' is not Python"), ("test_setup_code", "its setup '.*' is not")):
        for code in ("assert f(", "\0"):
            row = MBPP | {column: [code, "assert f(1)"] if column == "test_list" else code}
            with pytest.raises(DataError, match=message):
                make_task("code", data=write(tmp_path / "data.jsonl", MBPP, row, MBPP))
    for cases in ('{"inputs": null, "outputs": ["1"]}', '{"inputs": ["1", "2"], "outputs": ["1"]}', '{"outputs": []}'):
        with pytest.raises(DataError, match="does not have as many outputs as inputs"):
            make_task("code", data=write(tmp_path / "data.jsonl", APPS | {"input_output": cases}, APPS))
    with pytest.raises(DataError, match="input_output is not JSON"):
        make_task("code", data=write(tmp_path / "data.jsonl", APPS | {"input_output": "{"}, APPS))
    task = make_task("code", data=write(tmp_path / "data.jsonl", {"query": "a"}, {"query": "b"}), reward=LENGTH)
    assert task.gold(task.train[0]) is None and task.solved_at is None


def test_a_task_may_ask_for_a_function_with_the_name_of_one_of_python(tmp_path: Path) -> None:
    row = MBPP | {
        "text": "Write a function to add the common divisors of two numbers.",
        "code": "def sum(a, b):\n  return len([d for d in range(1, a + 1) if a % d == b % d == 0])",
        "test_list": ["assert sum(10, 15) == 2", "assert abs(sum(100, 150)) == 6"],
    }
    data = write(tmp_path / "data.jsonl", row)
    task = make_task("code", data=data, eval_data=data)
    assert task.train[0].text.endswith("It is called like this: sum(10, 15)")
    assert task.train[0].columns["entry"] == "sum"
    wrong = "def sum(a, b): return 2\nabs = lambda _: 6"  # the test's own abs is Python's
    assert compute_rewards(task, gold_answers(task)) == [1.0] and compute_rewards(task, [wrong]) == [0.0]
    for name, test in {"copy": "assert copy([1]) == [1]", "filter": "assert filter([0, 1]) == [1]"}.items():
        program = f"def {name}(x): return [item for item in x if item]"
        assert share_passed([program, "x = 1"], [[test]] * 2, sandbox=sandbox()) == [1.0, 0.0]


def test_a_single_test_and_a_conversation_are_supported() -> None:
    completion: Any = [{"role": "assistant", "content": "```\ndef f(): return 1\n```"}]
    assert share_passed([completion], ["assert f() == 1"], sandbox=sandbox()) == [1.0]
    assert all_passed(
        [completion] * 2, [["assert f() == 1"], ["assert f() == 1", "assert f() == 2"]], sandbox=sandbox()
    ) == [
        1.0,
        0.0,
    ]


BLOCKS = {
    "x = 1": "x = 1",
    "So:\n```python\nx = 1\n```\nor\n```\nx = 2\n```": "x = 1\n",
    "```py\nx = 1\ny": "x = 1\ny",
    "```\r\nx = 1\r\n```\r\n": "x = 1\r\n",
    # blocks in lists lose their indentation, and keep the program's
    "1. So:\n   ```python\n   if x:\n       y\n   ```\n": "if x:\n    y\n",
    "- So:\n\t```python\n\tx\n\t\ty\n\t```": "x\n\ty\n",
    "- So:\n  ```python\n  x\n\n  y\n```\nThat is it.": "x\n\ny\n",
    # blocks of other languages, and examples, are not the program
    "```bash\npip install x\n```\n```python\nx\n```": "x\n",
    "For\n```\n2\n```\nrun\n```Python3\nx\n```": "x\n",
    "```text\n2\n```\n```\nx\n```\n```\ny\n```": "x\n",
    "```{.python .numberLines}\nx\n```": "x\n",
    "```python title='a.py'\nx\n```": "x\n",
    "```pycon\n>>> 1\n```\n```python3.11\nx\n```": "x\n",
    "```sh\nls\n```": "```sh\nls\n```",
    # fences inside a program do not end it
    '```python\n"""\n    ```\n    f(2)\n    ```\n"""\nx\n```\nEnd': '"""\n    ```\n    f(2)\n    ```\n"""\nx\n',
    "````python\n'''\n```\n'''\n````": "'''\n```\n'''\n",
    "~~~python\n```\n~~~": "```\n",
    "```python\nx = '```'\n```": "x = '```'\n",
    "Write ```x``` or\n```python\ny\n```": "y\n",
}


def test_the_program_is_the_first_block_of_python_or_without_a_language_or_the_whole_completion() -> None:
    assert {text: extract_program(text) for text in BLOCKS} == BLOCKS


def test_settings_in_the_reward_s_name_are_checked_at_the_start() -> None:
    slow = "import time\ndef f(): time.sleep(30); return 1"
    with RewardWorker(f"cory_env.rewards.code:all_passed?sandbox={sandbox()}&seconds=8", timeout=60) as worker:
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


def test_hanging_programs_end_within_the_time_limit_of_a_call() -> None:
    with RewardWorker(f"cory_env.rewards.code:share_passed?sandbox={sandbox()}&seconds=60", timeout=8) as worker:
        count = 6
        rewards = worker.rewards(["?"] * count, ["while True: pass"] * count, {"tests": [["assert f() == 1"]] * count})
    assert rewards == [0.0] * count
