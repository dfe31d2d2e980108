"""How benchmarks measure and report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks.alternate import Turns, alternate
from benchmarks.processes import watched_memory
from benchmarks.record import Figure, Record, median


def test_sides_take_turns_and_begin_in_turn() -> None:
    order: list[str] = []
    turns = alternate({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=2, warm_up=1)
    assert order in (["a", "b", "b", "a", "a", "b"], ["b", "a", "a", "b", "b", "a"])
    assert {side: len(seconds) for side, seconds in turns.cpu.items()} == {"a": 2, "b": 2}


def test_a_ratio_is_the_median_of_the_rounds_ratios_so_that_a_slow_round_does_not_count() -> None:
    turns = Turns(cpu={"ours": [1.0, 10.0, 2.0], "bare": [2.0, 20.0, 2.2]})
    assert turns.ratio("bare", "ours", "cpu") == 2.0


@pytest.mark.parametrize(("value", "met"), [(0.91, True), (0.9, True), (0.89, False)])
def test_a_figure_says_whether_its_target_is_met(value: float, met: bool) -> None:
    assert Figure("share", value, at_least=0.9).met is met
    assert Figure("share", -value, at_most=-0.9).met is met
    assert Figure("share", value).met is None


def test_a_record_is_written_with_its_command_its_versions_and_every_run_of_a_median(tmp_path: Path) -> None:
    record = Record("learner", "fast", {"queries_per_update": 8}, [median("speed", [1.0, 3.0, 2.0], "×", at_least=1.5)])
    written = json.loads(record.write(tmp_path).read_text())
    assert written["command"] == "python -m benchmarks learner"
    assert "torch" in written["environment"]["versions"]
    assert written["figures"][0] | {"value": 2.0, "runs": [1.0, 3.0, 2.0], "met": True} == written["figures"][0]


def test_the_peak_of_memory_is_seen_though_it_was_given_back() -> None:
    with watched_memory() as before:
        pass
    with watched_memory() as peak:
        block = bytearray(b"x") * 200_000_000
        peak.look()
        del block
    assert peak.run - before.run > 150e6


def test_an_unknown_benchmark_is_refused_with_those_that_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", "lerner"])
    with pytest.raises(SystemExit) as stopped:
        command.main()
    assert stopped.value.code == 2
    assert "no benchmark `lerner`" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "constant"), [("against_trl", "TRL"), ("against_comlrl", "COMLRL")])
def test_without_its_library_a_benchmark_says_how_to_install_it(
    name: str, constant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(f"benchmarks.{name}.{constant}", tmp_path)
    assert command.measure(name, quick=True, out=tmp_path) == 2
    assert f"pip install --no-deps --target {tmp_path}" in capsys.readouterr().err
