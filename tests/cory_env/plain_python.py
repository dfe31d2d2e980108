"""Runs a program's tests in plain Python, without a sandbox: what the sandbox's verdicts are compared with.

Runs as a script in a folder with the program, `solution.py`. Its arguments are the project's root and two files: the
setup, the entry and the tests, as JSON, and the verdicts, a line of JSON for each test as soon as it ends.
"""

import ast
import builtins
import importlib
import json
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

PROGRAM = "solution"
SECONDS = 60.0


def run(text: str) -> str:
    """Returns the output of the program as a script with `text` as its input.

    Raises:
        CalledProcessError: Its exit code is not 0.
    """
    process = subprocess.run(
        [sys.executable, f"{PROGRAM}.py"],
        input=text.encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=SECONDS,
        check=True,
    )
    return process.stdout.decode(errors="replace")


def run_test(setup: str, entry: str, test: str, **functions: object) -> None:
    """Runs one test. It passes if it ends without an exception. A test that calls `run` does not import the program.

    Args:
        setup: Code that runs before the test.
        entry: A name that refers to the program even if the setup defines it.
        test: The test's code.
        **functions: The functions that tests of scripts call.
    """
    namespace: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    names = {node.id for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)}
    module = ModuleType("script") if "run" in names else importlib.import_module(PROGRAM)
    values = vars(module).items()
    namespace |= {name: value for name, value in values if not (name.startswith("__") and name.endswith("__"))}
    namespace |= functions
    exec(compile(setup, "<setup>", "exec"), namespace)
    if hasattr(module, entry):
        namespace[entry] = getattr(module, entry)
    exec(compile(test, "<test>", "exec"), namespace)


def main(root: str, tests_file: str, verdicts_file: str) -> None:
    """Runs the tests one after another, in this process."""
    sys.path.insert(0, root)
    from cory_env.sandbox.outputs import same_output

    sys.path[0] = os.getcwd()
    with open(tests_file, encoding="utf-8") as file:
        setup, entry, tests = json.load(file)
    with open(verdicts_file, "w", encoding="utf-8") as verdicts:
        for test in tests:
            try:
                run_test(setup, entry, test, run=run, same_output=same_output)
                verdict = True
            except BaseException:  # a program may raise anything
                verdict = False
            verdicts.write(f"{json.dumps(verdict)}\n")
            verdicts.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
