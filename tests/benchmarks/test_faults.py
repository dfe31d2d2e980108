"""How the faults' benchmark counts what a fault cost."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.faults import compare


def line(update: int, kl: float = 0.5, pioneer: str = "llm_1") -> dict[str, Any]:
    figures = {"llm_1": {"kl": kl * update}, "llm_2": {"kl": 0.1}}
    same = {"exchanges": 0, "tokens": 7, "weight_version_lag": 0}
    return {"update": update, "roles": {"pioneer": pioneer}, "policy": figures, **same}


CALM = [{"update": 0}, *(line(update) for update in range(1, 6))]


@pytest.mark.parametrize(
    ("shaken", "wrong"),
    [
        ([1, 2, 3], 0),
        ([1, 3], 1),
        ([1, 2, 2, 3], 1),
    ],
)
def test_updates_that_are_missing_or_doubled_count(shaken: list[int], wrong: int) -> None:
    assert compare([{"update": 0}, *map(line, shaken)], CALM) == wrong


def test_updates_with_other_figures_or_roles_count_and_rounding_does_not() -> None:
    results = [{"update": 0}, line(1, kl=0.5000001), line(2, kl=0.51), line(3, pioneer="llm_2"), line(4)]
    assert compare(results, CALM) == 2
