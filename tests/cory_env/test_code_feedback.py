"""Feedback on programs: what it says, that programs cannot forge it, and the public tests that it runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from cory_env.rewarding.worker import RewardError, RewardWorker
from cory_env.rewards import code
from cory_env.tasks import DataError, Task, make_task
from tests.cory_env.test_code import (
    APPS,
    APPS_CALLED,
    MBPP,
    SANITIZED,
    compute_rewards,
    gold_answers,
    sandbox,
    write,
)

SPEC = "cory_env.rewards.code:test_feedback"
TEST = "assert f(1) == 2"


def feedback(*programs: str, tests: Any = (TEST,), **settings: Any) -> list[str | None]:
    """Feedback on programs that all have the same public tests."""
    return code.test_feedback(
        programs, public_tests=[tests] * len(programs), sandbox=sandbox(), **{"seconds": "20", **settings}
    )


CASES = {
    "def f(x): return x + 1": None,
    "def f(x): return 3": f"Failed test: {TEST}\nExpected 2, got 3.",
    "def f(x): return '2'": f"Failed test: {TEST}\nExpected 2, got '2'.",
    "def f(x): pass": f"Failed test: {TEST}\nExpected 2, got None.",
    "def f(x): return map(int, '2')": f"Failed test: {TEST}\nExpected 2, got <map object>.",
    "def f(x):\n    y = x / 0\n    return y": (
        f"Failed test: {TEST}\nZeroDivisionError in line 2, `y = x / 0`: division by zero"
    ),
    "def g(x):\n    raise Exception\ndef f(x): return g(x)": (
        f"Failed test: {TEST}\nException in line 2, `raise Exception`"
    ),
    "def f(x):\n    return {}[x]": f"Failed test: {TEST}\nKeyError in line 2, `return {{}}[x]`: 1",
    "table = {}[0]\ndef f(x): return 2": f"Failed test: {TEST}\nKeyError in line 1, `table = {{}}[0]`: 0",
    "class Error(BaseException): pass\ndef f(x): raise Error('a\\n\\x1b[0mb')": (
        f"Failed test: {TEST}\nError in line 2, `def f(x): raise Error('a\\n\\x1b[0mb')`: a \\x1b[0mb"
    ),
    "def f(x) return 2": "SyntaxError in line 1, `def f(x) return 2`: expected ':'",
    "def f(x):\nreturn 2": (
        "IndentationError in line 2, `return 2`: expected an indented block after function definition on line 1"
    ),
    "def g(x): return 2": f"Failed test: {TEST}\nNameError: name 'f' is not defined",
    "": f"Failed test: {TEST}\nNameError: name 'f' is not defined",
    "import os\nos._exit(0)": f"Failed test: {TEST}\nThe program ended without a result.",
    "import sys\nsys.exit(3)": f"Failed test: {TEST}\nSystemExit in line 2, `sys.exit(3)`: 3",
    "def f(x): return f(x)": (
        f"Failed test: {TEST}\nRecursionError in line 1, `def f(x): return f(x)`: maximum recursion depth exceeded"
    ),
    "kept = []\nwhile True: kept.append(bytes(2**20))": (
        f"Failed test: {TEST}\nMemoryError in line 2, `while True: kept.append(bytes(2**20))`: the memory limit is "
        "512 MiB"
    ),
}


def test_feedback_says_why_a_program_fails() -> None:
    assert dict(zip(CASES, feedback(*CASES), strict=True)) == CASES


def test_an_endless_program_exceeds_the_time_limit() -> None:
    programs = ["while True: pass", "def f(x):\n    while x: pass"]
    expected = f"Failed test: {TEST}\nThe program exceeds the time limit."
    assert feedback(*programs, seconds="1") == [expected, expected]


@pytest.mark.parametrize(
    ("test", "program", "expected"),
    [
        ("assert 2 == f(1)", "def f(x): return 3", "Expected 2, got 3."),
        ("assert f(1) is True", "def f(x): return 1", "Expected True, got 1."),
        ("assert set(f(1)) == set((4, 5))", "def f(x): return [4]", "Expected {4, 5}, got {4}."),
        ("value = f(1)\nassert value == 2", "def f(x): return 3", "Expected 2, got 3."),
        ("import math\nassert math.isclose(f(1), 2.0)", "def f(x): return 3.0", "Expected 2.0, got 3.0."),
        (
            "for k in (1, 2, 3):\n    assert f(k) == k * k",
            "def f(x): return x",
            "Expected 4, got 2.",
        ),
        ("assert abs(f(32) - 1) < 1e-9", "def f(x): return 5.0", "The last call, with (32), returned 5.0."),
        ("assert f(x=1) < 2", "def f(x): return 3", "The last call, with (x=1), returned 3."),
        (
            "assert sorted(f(1)) == [1]",
            "def f(x): pass",
            "TypeError: 'NoneType' object is not iterable\nThe last call, with (1), returned None.",
        ),
        ("assert f(1) == 1\nassert not f(2)", "def f(x): return 1", "The last call, with (2), returned 1."),
    ],
)
def test_feedback_names_expected_and_got_of_many_shapes_of_tests(test: str, program: str, expected: str) -> None:
    assert feedback(program, tests=[test]) == [f"Failed test: {test}\n{expected}"]


def test_the_first_failed_test_counts() -> None:
    tests = ["assert f(1) == 1", "assert f(2) == 4", "assert f(3) == 9"]
    assert feedback("def f(x): return x", "def f(x): return x * x", tests=tests) == [
        "Failed test: assert f(2) == 4\nExpected 4, got 2.",
        None,
    ]


def test_programs_that_print_are_compared_by_their_output() -> None:
    test = "assert same_output(run('1\\n2\\n'), '3\\n')"
    assert feedback(
        "print(int(input()) + int(input()))",
        "print(12)",
        "int('a')",
        "def f(: pass",
        "print(len, lambda: 0)",
        tests=test,
    ) == [
        None,
        "Failed test: input '1\\n2\\n'\nExpected '3\\n', got '12\\n'.",
        "Failed test: input '1\\n2\\n'\nValueError in line 1, `int('a')`: invalid literal for int() with base 10: 'a'",
        "SyntaxError in line 1, `def f(: pass`: invalid syntax",
        "Failed test: input '1\\n2\\n'\nExpected '3\\n', got '<built-in function len> <function <lambda>>\\n'.",
    ]


REPLIES = "import sys\nsys.modules['cory_env.sandbox.script'].Program.describe = lambda *_:"
FORGERIES = (
    "def f(x): return 'true\\n' * 9",
    "def f(x): raise Exception('true\\n[]\\nnull\\n' * 9)",
    "import os\nfor fd in range(64):\n    try: os.write(fd, b'true\\n' * 9)\n    except OSError: pass\ndef f(x): pass",
    f"{REPLIES} (True, True)\ndef f(x): return {{}}[x]",
    f"{REPLIES} ('E', 1, 2j)\ndef f(x): return {{}}[x]",
    "class E(Exception):\n    def __str__(self): import os; os._exit(0)\ndef f(x): raise E",
    "class Yes(int):\n    __eq__ = lambda *_: True\n    __repr__ = lambda *_: '2'\ndef f(x): return Yes(3)",
    "class Yes:\n    __eq__ = lambda *_: True\n    __repr__ = lambda *_: '2'\ndef f(x): return Yes()",
    "def f(x): raise SyntaxError('no', ('<program>', 10**9, 1, 'text'))",
)


def test_programs_cannot_forge_that_nothing_is_to_be_corrected() -> None:
    texts = feedback(*FORGERIES)
    assert None not in texts
    assert texts[6:8] == [
        f"Failed test: {TEST}\nExpected 2, got 3.",
        f"Failed test: {TEST}\nExpected 2, got <Yes object>.",
    ]


def test_feedback_is_short_whatever_the_program_does() -> None:
    programs = (
        "def f(x): return 'x' * 10**6",
        "def f(x): return list(range(10**5))",
        "def f(x): raise Exception('\\U0001f600' * 10**6)",
        "class E(Exception): pass\nE.__name__ = 'E' * 10**5\ndef f(x): raise E('\\ud800' * 10**5)",
        "def f(x): " + "x = 1; " * 1000 + "return 1 / 0",
        "class A: pass\nA.__name__ = 'A' * 10**5\ndef f(x): return A()",
        "def f(x):\n    a = []\n    for _ in range(900): a = [a]\n    return a",
        "def f(x): return 10**10000",
        "f" * 10**5,
    )
    long_test = f"assert f({list(range(500))}) == {list(range(500))}"
    for tests in ([TEST], [long_test]):
        for text in feedback(*programs, tests=tests):
            assert text is not None and 20 < len(text) <= code.MAX_FEEDBACK, text
            text.encode()
            assert all(c.isprintable() or c == "\n" for c in text)


def test_long_values_are_shown_where_they_differ() -> None:
    values = list(range(200))
    (text,) = feedback(f"def f(x): return {[*values[:150], 7, *values[151:]]}", tests=[f"assert f(1) == {values}"])
    assert text is not None
    assert "Expected …45, 146, 147, 148, 149" not in text  # only a few characters before the difference
    expected, got = text.partition("Expected …")[2].split(", got …")
    assert "149, 150, 151" in expected and "149, 7, 151" in got


def test_without_public_tests_feedback_is_never_none() -> None:
    untested = "There are no public tests, so the program was not tested."
    no_tests: tuple[Any, ...] = ([], None)
    for tests in no_tests:
        assert feedback("def f(x): return 2", "def f(x) return 2", "1 / 0", tests=tests) == [
            untested,
            "SyntaxError in line 1, `def f(x) return 2`: expected ':'",
            untested,
        ]
    programs = ["def f(x): return 2", "1 / 0", "def g(x): return 2"]
    assert code.test_feedback(programs, entry=["f"] * 3, sandbox=sandbox()) == [
        untested,
        "ZeroDivisionError in line 1, `1 / 0`: division by zero",
        "NameError: name 'f' is not defined",
    ]


def test_the_worker_checks_the_sandbox_of_feedback_too() -> None:
    reward = f"cory_env.rewards.code:share_passed?sandbox={sandbox()}"
    columns: dict[str, list[object]] = {"tests": [["assert f(2) == 3"]] * 2, "public_tests": [[TEST]] * 2}
    with RewardWorker(reward, feedback=f"{SPEC}?sandbox={sandbox()}", timeout=60) as worker:
        completions = ["def f(x): return x + 1", "```\ndef f(x): return 3\n```"]
        assert worker.feedback(["?"] * 2, completions, columns) == [None, f"Failed test: {TEST}\nExpected 2, got 3."]
        assert worker.rewards(["?"] * 2, completions, columns) == [1.0, 1.0]
    worker = RewardWorker(reward, feedback=f"{SPEC}?sandbox=on", timeout=60)
    with worker, pytest.raises(RewardError, match="must be required or off"):
        worker.start()


def public_tests(tmp_path: Path, row: dict[str, Any]) -> tuple[Any, Any]:
    """The public and the hidden tests of a row."""
    data = write(tmp_path / "data.jsonl", row)
    task = make_task("code", data=data, eval_data=data)
    assert compute_rewards(task, gold_answers(task)) == [1.0]
    public: Any = task.train[0].columns["public_tests"]
    columns = {name: [task.train[0].columns.get(name)] for name in ("setup", "entry")}
    result = code.test_feedback(gold_answers(task), [public], sandbox=sandbox(), **columns)  # type: ignore[arg-type]
    assert result == [None if public else "There are no public tests, so the program was not tested."]
    return public, task.train[0].columns["tests"]


OWN: dict[str, Any] = {
    "query": "Add.",
    "tests": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
    "solution": "add = lambda a, b: a + b",
}


def test_the_first_of_several_tests_becomes_public(tmp_path: Path) -> None:
    assert public_tests(tmp_path, OWN) == (OWN["tests"][:1], OWN["tests"][1:])
    assert public_tests(tmp_path, OWN | {"tests": OWN["tests"][0]}) == ([], OWN["tests"][:1])
    assert public_tests(tmp_path, OWN | {"public_tests": None}) == (OWN["tests"][:1], OWN["tests"][1:])
    mbpp_tests: Any = MBPP["test_list"]
    assert public_tests(tmp_path, MBPP) == (mbpp_tests[:1], mbpp_tests[1:])
    assert public_tests(tmp_path, SANITIZED) == ([], SANITIZED["test_list"])
    public, hidden = public_tests(tmp_path, APPS)
    assert public == ["assert same_output(run('2\\n1 2\\n3 4\\n'), '3.0\\n7.0\\n')"] and len(hidden) == 1
    assert public_tests(tmp_path, APPS_CALLED) == (
        ["assert same_value(Solution().add(1, 2), [3, 1])"],
        ["assert same_value(Solution().add(0, 5), [[5, 0]])"],
    )


def test_a_row_may_bring_its_own_public_tests(tmp_path: Path) -> None:
    own = ["assert add(5, 5) == 10"]
    assert public_tests(tmp_path, OWN | {"public_tests": own}) == (own, OWN["tests"])
    assert public_tests(tmp_path, OWN | {"public_tests": own[0]}) == (own, OWN["tests"])
    assert public_tests(tmp_path, OWN | {"public_tests": []}) == ([], OWN["tests"])
    assert public_tests(tmp_path, MBPP | {"public_tests": []}) == ([], MBPP["test_list"])
    for wrong, message in (
        ([3], r"column public_tests contains \[3\], but must be code"),
        (["assert ("], "is not Python"),
        ({"a": 1}, "column public_tests contains {'a': 1}"),
    ):
        with pytest.raises(DataError, match=message):
            public_tests(tmp_path, OWN | {"public_tests": wrong})


def test_prompts_contain_feedback_and_not_the_hidden_tests(tmp_path: Path) -> None:
    def task(**settings: Any) -> Task:
        return make_task(
            "code", data=write(tmp_path / "data.jsonl", OWN), eval_data=tmp_path / "data.jsonl", **settings
        )

    (query,) = task(feedback="task").train
    prompt = task(feedback="task").observer_prompt(query, ["add = 1"], "Failed test: assert add(1, 2) == 3")
    assert "\n\nadd = 1\n\nThe result of its tests:\n\nFailed test: assert add(1, 2) == 3\n\nAnswer with" in prompt
    assert "add(0, 0)" not in prompt
    assert "result" not in task().observer_prompt(query, ["add = 1"])


def test_bundled_problems_have_public_tests_and_differ() -> None:
    task = make_task("code")
    texts, signatures = set(), set()
    for query in task.all_queries():
        tests: Any = query.columns["tests"]
        public: Any = query.columns["public_tests"]
        assert len(public) == 1 and len(tests) >= 2
        name = query.text.partition("`")[2].partition("(")[0]
        texts.add("".join(filter(str.isalnum, query.text.replace(name, "").lower())))
        signatures.add(json.dumps(sorted(test.replace(name, "f") for test in tests)))
    assert len(texts) == len(signatures) == len(list(task.all_queries())) == 223
