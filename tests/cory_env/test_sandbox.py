"""The sandbox, against programs that try to escape, to harm the machine, or to forge results."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from cory_env.sandbox import machine
from cory_env.sandbox.failures import Failure
from cory_env.sandbox.grading import Limits, Submission, TimeBudget, find_failures, grade
from cory_env.sandbox.machine import SandboxError, require_sandbox

MB = 2**20


@pytest.fixture
def require_working_sandbox() -> None:
    """Skips if this user cannot use the sandbox; root uses another sandbox than other users."""
    try:
        require_sandbox()
    except SandboxError as error:
        pytest.skip(str(error))


def run_tests(program: str, *tests: str, seconds: float = 20, setup: str = "", entry: str = "") -> list[bool]:
    (results,) = grade([Submission(program, tests, setup, entry)], Limits(seconds), "required")
    return results


REPORT = """
import os, socket, sys
def attempt_result(function, *arguments):
    try:
        function(*arguments)
    except (OSError, MemoryError, RuntimeError) as error:
        return type(error).__name__
    return "done"
"""


def test_forbidden_operations_of_programs_fail(require_working_sandbox: None, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        program = REPORT + (
            "import ctypes, threading\n"
            "def forks():\n"
            "    return [attempt_result(f) for f in (os.fork, lambda: os.posix_spawn('/bin/true', ['a'], {}))]\n"
            "def threads():\n"
            "    stop = threading.Event()\n"
            "    threading.stack_size(65536)\n"
            "    results = [attempt_result(threading.Thread(target=stop.wait).start) for _ in range(200)]\n"
            "    stop.set()\n"
            "    return results.count('done')\n"
            f"def calls(): return attempt_result(socket.create_connection, ('127.0.0.1', {port}), 5)\n"
            "def resolves(): return attempt_result(socket.create_connection, ('deb.debian.org', 80), 5)\n"
            "def reads(path): return attempt_result(open, path)\n"
            "def homes(): return [p for p in ('/home', '/root/.bashrc', '/proc', '/var') if os.path.exists(p)]\n"
            "def writes(folder): return attempt_result(open, folder + '/x', 'w')\n"
            "def links(): return attempt_result(os.symlink, '/etc', '/usr/x')\n"
            "def fills():\n"
            "    with open('x', 'wb') as file:\n"
            "        return attempt_result(file.write, bytes(17 * 2**20))\n"
            "def eats(): return attempt_result(bytearray, 2**30)\n"
            f"def kills(): return attempt_result(os.kill, {os.getpid()}, 9)\n"
            "def frees(): return ctypes.CDLL(None).mount(None, b'/usr', None, ctypes.c_ulong(32 | 4096), None)\n"
            "def escapes(): return [ctypes.CDLL(None).chroot(b'/tmp'), os.getuid() == 0]\n"
            "def knows(): return sorted(os.environ)\n"
            "def temporary(): open('y', 'w').write('a'); return open('/tmp/y').read(), os.getcwd()\n"
            "def holds(): return [fd for fd in range(3, 60) if attempt_result(os.fstat, fd) == 'done']\n"
        )
        prefix = repr(os.path.dirname(os.__file__))
        results = run_tests(
            program,
            "assert forks() == ['BlockingIOError'] * 2",
            "assert 8 < threads() < 100",
            "assert calls() != 'done' and resolves() != 'done'",
            f"assert reads({str(secret)!r}) == 'FileNotFoundError' == reads('/etc/passwd')",
            "assert homes() == []",
            f"assert 'done' not in [writes(f) for f in ('/', '/usr', '/sandbox', '/dev', '/etc', {prefix})]",
            "assert links() in ('OSError', 'PermissionError')",
            "assert temporary() == ('a', '/tmp')",
            "assert fills() == 'OSError'",
            "assert eats() == 'MemoryError'",
            "assert kills() == 'ProcessLookupError'",
            "assert frees() == -1",
            "assert escapes() == [-1, False]",
            "assert not [name for name in knows() if 'KEY' in name or 'TOKEN' in name or 'RAY' in name]",
            "assert len(holds()) == 2",  # the two ends of the channel to the tester, moved away from standard streams
        )
        assert results == [True] * 15
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()
    assert secret.read_text() == "key" and not Path("/usr/x").exists()


FORGERIES = {
    "makes a class in the tests' process": (
        "import sys\nframe = sys._getframe()\n"
        "while not hasattr(frame.f_locals.get('self'), 'values'): frame = frame.f_back\npeer = frame.f_locals['self']\n"
        "def f(x): return peer.request('call', type, ('Yes', (), {'__eq__': lambda *_: True}), ())()"
    ),
    "is zero after any arithmetic": (
        "class Zero:\n    __sub__ = __rsub__ = __abs__ = lambda *_: Zero()\n    __float__ = lambda _: 0.0\n"
        "    __lt__ = __gt__ = __contains__ = lambda *_: True\ndef f(x): return Zero()"
    ),
    "is a number that is zero after any arithmetic": (
        "class A: pass\nclass Zero(A, int):\n    __sub__ = __rsub__ = __abs__ = lambda *_: Zero(0)\n"
        "def f(x): return Zero(7)"
    ),
    "answers NumPy": "class Any:\n    __array_ufunc__ = lambda *_, **__: True\ndef f(x): return Any()",
    "ends before the tests": "import os\nos._exit(0)",
    "exits": "raise SystemExit(0)",
    "kills whom it can": "import os, signal\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)\nos.kill(0, 9)\nos._exit(0)",
    "equals everything": "class Yes:\n    __eq__ = lambda *_: True\n    __hash__ = None\ndef f(x): return Yes()",
    "is a number that equals everything": (
        "class Yes(int):\n    __eq__ = lambda *_: True\n    __hash__ = int.__hash__\ndef f(x): return Yes(0)"
    ),
    "is a text that equals everything": "class Yes(str):\n    __eq__ = lambda *_: True\ndef f(x): return Yes('no')",
    "is a list that equals everything": "class Yes(list):\n    __eq__ = lambda *_: True\ndef f(x): return Yes()",
    "has no assertions": "import builtins\nbuiltins.AssertionError = type('E', (), {})\ndef f(x): return 0",
    "patches built-in functions": "import builtins\nbuiltins.all = builtins.bool = lambda *_: True\ndef f(x): return 0",
    "patches unittest": (
        "import unittest\nunittest.TestCase.assertEqual = lambda *_: None\nunittest.main = lambda *_: None\n"
        "def f(x): return 0"
    ),
    "patches this sandbox": (
        "import sys\nsys.modules['cory_env.sandbox.values'].Values._encode = lambda *_: 2\ndef f(x): return 0"
    ),
    "prints a verdict": "print('1' * 9, flush=True)\ndef f(x): return print('passed', '11')",
    "writes a verdict everywhere": (
        "import os\nfor fd in range(64):\n    try: os.write(fd, b'1')\n    except OSError: pass\ndef f(x): return 0"
    ),
    "returns too much": "def f(x): return 'x' * 2**23",
    "returns itself": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "is no program": "def f(x) return 2",
    "has no such function": "def g(x): return 2",
    "ends the iteration of a test": "def f(x): raise StopIteration",
    "raises what nobody knows": "class E(BaseException): pass\ndef f(x): raise E",
}
ENDLESS = {
    "sleeps": "import time\ntime.sleep(1000)",
    "never ends": "def f(x):\n    while True: pass",
    "bombs": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "prints": "while True: print('1' * 65536)",
    "writes everywhere": (
        "import os\nfor fd in range(64):\n    try: os.set_blocking(fd, False)\n    except OSError: pass\nwhile True:\n"
        "    for fd in range(64):\n        try: os.write(fd, b'1' * 65536)\n        except OSError: pass"
    ),
    "eats in pieces": "kept = []\nwhile True:\n    try: kept.append(bytes(2**20))\n    except MemoryError: pass",
}


def test_python_and_its_packages_may_be_below_the_temporary_folder(
    require_working_sandbox: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(program: str) -> subprocess.CompletedProcess[str]:
        command = machine.sandbox_command([machine.interpreter(), *machine.OPTIONS, "-c", program])
        return subprocess.run(command, capture_output=True, text=True, env=machine.environment())

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)  # by default, other users cannot read it
        Path(folder, "package.py").write_text("print('imported')")
        monkeypatch.setattr(machine, "packages", lambda: folder)
        process = run(f"import sys; sys.path.append({folder!r}); import package; open('x', 'w')")
        assert (process.returncode, process.stdout) == (0, "imported\n"), process.stderr
        assert "Error" in run(f"open('{folder}/y', 'w')").stderr and not Path(folder, "y").exists()


def test_packages_of_a_script_are_imported_once_for_all_inputs(require_working_sandbox: None) -> None:
    program = "import sys\nprint({'packaging.version', 'yaml'} <= {*sys.modules})\nimport packaging.version\n"
    program += "def never():\n    from yaml import nodes\n    import no_such_package\n"
    assert run_tests(program, *["assert run('') == 'True\\n'"] * 2) == [True, True]
    assert run_tests("import sys\nprint('yaml' in sys.modules)", "assert run('') == 'False\\n'") == [True]


def test_programs_pass_only_by_returning_right_values(require_working_sandbox: None) -> None:
    tests = ["assert f(1) == 2", "assert all(map(lambda y: y == 3, map(f, [2])))", "assert abs(f(1) - 2) < 1e-6"]
    tests += ["import numpy\nassert numpy.isclose(f(1), 2)", "assert 1 < f(1) <= 2", "assert 2 in [f(1)]"]
    programs = [*FORGERIES.values(), "def f(x): return x + 1", "def f(x): return 2"]
    results = grade([Submission(program, tests) for program in programs], Limits(seconds=20), "required")
    wrong = [name for name, result in zip(FORGERIES, results[:-2], strict=True) if any(result)]
    assert not wrong
    assert results[-2:] == [[True] * 6, [True, False, True, True, True, True]]


def test_a_program_cannot_reach_the_tests_through_what_they_pass_to_it(require_working_sandbox: None) -> None:
    program = (
        "def reach(target, path):\n"
        "    for name in path.split('.'):\n"
        "        target = getattr(target, name)\n"
        "    return True\n"
    )
    paths = {
        "lambda: 0": ("__globals__", "__closure__", "__code__.co_consts"),
        "(x for x in '')": ("gi_frame", "gi_code"),
        "Own()": ("__class__.name", "__dict__", "_secret", "method.__func__", "method.__self__"),
        "__import__('types').ModuleType('m')": ("name", "__dict__"),
        "[].append": ("__self__",),
    }
    setup = "class Own:\n    _secret = 1\n    name = 'a'\n    def method(self): pass\n"
    tests = [f"assert reach({code}, {path!r})" for code, names in paths.items() for path in names]
    assert run_tests(program, *tests, "assert reach(Own(), 'name')", setup=setup) == [False] * len(tests) + [True]


def test_a_program_cannot_disguise_the_names_that_it_requests(require_working_sandbox: None) -> None:
    program = (
        "class Name(str):\n"
        "    __str__ = lambda _: shown\n"
        "    startswith = lambda *_: False\n"
        "def reach(target, name, other):\n"
        "    global shown\n"
        "    shown = other\n"
        "    return getattr(target, Name(name))\n"
        "def f(function):\n"
        "    reach(function, '__globals__', '__name__')['all'] = lambda *_: True\n"
        "    return 3\n"
    )
    tests = [
        "assert reach(lambda: 0, '__globals__', '__name__') is not None",
        "assert reach(Own(), '__dict__', 'name') is not None",
        "result = f(lambda x: x + 1)\nassert all(x == 2 for x in [result])",
    ]
    assert run_tests(program, *tests, setup="class Own: pass\n") == [False, False, False]


def test_only_iterators_of_a_program_end_an_iteration_of_a_test(require_working_sandbox: None) -> None:
    program = (
        "class Ends:\n"
        "    def __len__(self): raise StopIteration\n"
        "    __abs__ = __str__ = __hash__ = __bool__ = __iter__ = __len__\n"
        "    def __getitem__(self, key): raise StopIteration\n"
        "    __contains__ = __getitem__\n"
        "def f(x): return Ends()\n"
        "def items(n): yield from range(n)\n"
    )
    functions = ("len", "abs", "str", "hash", "bool", "iter", "operator.itemgetter(0)", "lambda x: 2 in x")
    tests = [f"import operator\nassert all(map({function}, map(f, [2])))" for function in functions]
    results = run_tests(program, *tests, "assert list(map(abs, items(3))) == [0, 1, 2]")
    assert results == [False] * len(functions) + [True]


def test_endless_programs_are_ended(require_working_sandbox: None) -> None:
    submissions = [Submission(program, ["assert f(1) == 1"]) for program in ENDLESS.values()]
    started = time.monotonic()
    assert grade(submissions, Limits(seconds=0.5), "required") == [[False]] * len(ENDLESS)
    assert time.monotonic() - started < 15


def test_plain_data_is_transferred_and_objects_stay_in_the_program(require_working_sandbox: None) -> None:
    program = (
        "from collections import Counter, deque\n"
        "def same(x): return x\n"
        "def raises(): return {}[1]\n"
        "def counted(x): return Counter(x)\n"
        "def lazily(n): yield from range(n)\n"
        "class Box:\n"
        "    def __init__(self, x): self.x = x\n"
        "    def twice(self): return Box(2 * self.x)\n"
        "def opened(box): return box.x\n"
    )
    values = "[1, 2**200, -0.5, 1j, None, True, 'é\\ud800', b'\\0', (1, (2,)), {1, 2}, frozenset('a'), {(1, 2): [3]}]"
    assert run_tests(
        program,
        f"for x in {values}: assert same(x) == x and type(same(x)) is type(x)",
        "assert same(float('nan')) != same(float('nan')) and same(1) is not True",
        "assert counted('aab') == {'a': 2, 'b': 1} and list(lazily(3)) == [0, 1, 2]",
        "box = Box(2)\nbox.x = 4\nassert box.twice().x == 8 == opened(box.twice())",
        "try:\n    raises()\nexcept KeyError:\n    pass\nelse:\n    assert False",
        "assert Box(1) == Box(1)",
    ) == [True] * 5 + [False]


def test_a_program_cannot_replace_names_of_the_setup_or_the_standard_library(require_working_sandbox: None) -> None:
    program = "class math:\n    isclose = lambda *_: True\ndef helper(x): return x\ndef f(x): return helper(x)"
    setup = "def helper(x):\n    return x + 1\ndef f(x):\n    return 0"
    tests = ["assert math.isclose(f(1), 2)", "assert helper(1) == 2", "assert f(1) == 1"]
    assert run_tests(program, *tests, setup=setup, entry="f") == [False, True, True]


def test_a_program_runs_as_a_script_that_reads_and_prints(require_working_sandbox: None) -> None:
    program = (
        "import os, sys\n"
        "n = int(input())\n"
        "rest = sys.stdin.read().split()\n"
        "print(n, *rest)\n"
        "os.write(1, b'')\n"
        "if __name__ == '__main__': print(1 / 3)\n"
        "sys.exit()\n"
    )
    assert run_tests(
        program,
        "assert same_output(run('2\\na b\\n'), '2 a b\\n0.333333333')",
        "assert same_output(run('3\\n'), '3\\n0.33333333  \\n\\n')",
        "assert same_output(run('3\\n'), '3\\n0.3334')",
        "assert same_output(run('x'), '')",
    ) == [True, True, False, False]


def test_tests_passed_before_the_time_limit_count(require_working_sandbox: None) -> None:
    program = "def f(x):\n    while x > 1: pass\n    return x"
    started = time.monotonic()
    assert run_tests(program, "assert f(1) == 1", "assert f(2) == 2", "assert f(1) == 1", seconds=2) == [
        True,
        False,
        False,
    ]
    assert time.monotonic() - started < 10


def test_hanging_programs_together_keep_the_total_time_limit(require_working_sandbox: None) -> None:
    started = time.monotonic()
    submissions = [Submission("while True: pass", ["assert f(1) == 1"])] * 12
    assert grade(submissions, Limits(seconds=60), "required", total=3) == [[False]] * 12
    assert time.monotonic() - started < 15


def test_the_time_budget_leaves_time_for_the_last_program() -> None:
    budget = TimeBudget(8, 2, 10.0, 20.0)
    assert [round(budget.next(), 1) for _ in range(8)] == [5.0, 5.0, 6.7, 6.7, 10.0, 10.0, 10.0, 10.0]


def test_explained_failures_agree_with_the_verdicts(require_working_sandbox: None) -> None:
    tests = ["assert f(1) == 2", "assert all(map(lambda y: y == 3, map(f, [2])))"]
    programs = [*FORGERIES.values(), "def f(x): return x + 1", "def f(x): return 2"]
    submissions = [Submission(program, tests) for program in programs]
    failures = find_failures(submissions, Limits(seconds=20), "required")
    assert [failure and failure.test for failure in failures] == [*([0] * len(FORGERIES)), None, 1]
    reasons = {name: failure and failure.reason for name, failure in zip(FORGERIES, failures, strict=False)}
    assert reasons["ends before the tests"] == reasons["patches this sandbox"] == "ended"
    assert reasons["equals everything"] == "value"
    assert reasons["exits"] == reasons["is no program"] == reasons["ends the iteration of a test"] == "exception"
    assert failures[-1] == Failure("value", test=1, call="with (2), returned 2")


def test_explained_failures_keep_the_total_time_limit(require_working_sandbox: None) -> None:
    started = time.monotonic()
    submissions = [Submission(program, ["assert f(1) == 1"]) for program in ENDLESS.values()]
    failures = find_failures(submissions, Limits(seconds=60), "required", total=3)
    reasons = {name: failure and failure.reason for name, failure in zip(ENDLESS, failures, strict=True)}
    assert reasons.pop("writes everywhere") in ("time", "ended")  # the tester ends at garbage, if it gets enough of it
    assert set(reasons.values()) == {"time"}
    assert time.monotonic() - started < 15


def test_a_killed_grader_leaves_no_processes(require_working_sandbox: None) -> None:
    marker = str(700 * MB + os.getpid())
    code = (
        "from cory_env.sandbox.grading import Limits, Submission, grade\n"
        f"grade([Submission('while True: pass', ['assert f()'])], Limits(seconds=99, memory={marker}), 'required')"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])

    def alive_pids() -> list[str]:
        pids = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and marker.encode() in (folder / "cmdline").read_bytes():
                    pids.append(folder.name)
        return [number for number in pids if int(number) != process.pid]

    def wait_until(running: bool) -> None:
        deadline = time.monotonic() + 20
        while bool(alive_pids()) != running:
            assert time.monotonic() < deadline, f"processes {alive_pids()}"
            time.sleep(0.05)

    try:
        wait_until(True)
        time.sleep(0.3)
    finally:
        process.kill()
        process.wait()
    wait_until(False)


def test_a_missing_sandbox_is_an_error_unless_it_is_disabled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing_command = lambda command: ["/bin/sh", "-c", "echo no namespaces >&2; exit 1"]  # noqa: E731
    monkeypatch.setattr(machine, "sandbox_command", failing_command)
    require_sandbox.cache_clear()
    submission = Submission("def f(x): return x", ["assert f(1) == 1", "assert f(1) == 2"])
    with pytest.raises(SandboxError, match=r"\(no namespaces\)\. Install bubblewrap.*sandbox=off"):
        grade([submission], Limits(), "required")
    assert grade([submission], Limits(), "off") == [[True, False]]
    with pytest.raises(SandboxError, match="required or off"):
        grade([submission], Limits(), "on")
    require_sandbox.cache_clear()
