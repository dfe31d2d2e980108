"""The bundled problems: no two are duplicates."""

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cory_env.tasks import make_task

SECONDS = 0.3


class OutOfTime(BaseException):
    """A solution does not end with the arguments of another problem."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise OutOfTime

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def passes(solution: dict[str, Any], name: str, test: str) -> bool:
    """Whether the function `name` of a solution passes a test that calls it FUNCTION."""
    try:
        with time_limit(SECONDS):
            exec(test, {**solution, "FUNCTION": solution[name]})
    except (Exception, OutOfTime):
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_solution_passes_the_tests_of_another_problem() -> None:
    task = make_task("code")
    solutions: dict[str, dict[str, Any]] = {}
    tests: dict[str, list[str]] = {}
    for query in task.all_queries():
        name = re.findall(r"`(\w+)\(", query.text)[0]
        columns: Any = query.columns
        assert name not in solutions
        solutions[name] = {}
        exec(columns["solution"], solutions[name])
        tests[name] = [re.sub(rf"\b{name}\b", "FUNCTION", t) for t in columns["public_tests"] + columns["tests"]]
    equivalent = {
        (name, other)
        for name, solution in solutions.items()
        for other, other_tests in tests.items()
        if name != other and all(passes(solution, name, test) for test in other_tests)
    }
    assert equivalent == {("area", "repeat"), ("repeat", "area")}  # Python's * multiplies numbers and repeats texts
