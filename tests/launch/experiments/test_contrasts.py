"""Contrasts against numbers computed by hand."""

from pathlib import Path
from typing import Any

import pytest

from launch.display.statistics import holm
from launch.experiments.contrasts import Contrast, contrasts_table, evaluate_contrasts
from launch.experiments.results import StudyRun
from launch.experiments.study import load_study
from tests.launch.experiments.test_tables import lines
from tests.launch.results_of_studies import policy_metrics, study_run


def test_holm_corrects_the_smallest_p_for_all_tests_the_next_for_one_less_and_keeps_the_order() -> None:
    corrected = holm([0.04, 0.01, None, 0.03], 4)
    assert corrected[2] is None
    assert [p for p in corrected if p is not None] == pytest.approx([0.09, 0.04, 0.09])  # 0.04 * 2 is below 0.03 * 3
    assert holm([0.5, 0.6], 2) == [1.0, 1.0]
    assert holm([0.01], 6) == pytest.approx([0.06])  # one of six planned tests was possible


def make_runs(arm: str, rewards: list[float], last_offset: float | None = None) -> list[StudyRun]:
    runs = [study_run(arm, seed, policy_metrics(reward, 0.0)) for seed, reward in enumerate(rewards)]
    if last_offset is not None:
        for run, reward in zip(runs, rewards, strict=True):
            assert run.final is not None
            run.final["last_response"] = policy_metrics(reward + last_offset, 0.0)
    return runs


def test_contrasts_are_paired_by_seed_with_the_verdicts_above_level_open_and_below() -> None:
    runs = [
        *make_runs("base", [1.0, 2.0, 3.0]),
        *make_runs("higher", [1.5, 2.4, 3.6], last_offset=-1.0),
        *make_runs("same", [1.01, 2.0, 2.99]),
        *make_runs("wild", [2.0, 2.0, 2.9]),
    ]
    contrasts = [
        Contrast(arm="higher", against="base"),
        Contrast(arm="higher", of="last", against="base"),
        Contrast(arm="same", against="base"),
        Contrast(arm="wild", against="base"),
        Contrast(arm="missing", against="base"),
        Contrast(arm="base", of="mean", against="same"),  # has no mean LLM
    ]
    higher, last, same, wild = evaluate_contrasts(contrasts, runs)
    assert higher.difference.values == pytest.approx((0.5, 0.4, 0.6)) and higher.verdict == "above"
    assert last.difference.values == pytest.approx((-0.5, -0.6, -0.4)) and last.verdict == "below"
    assert same.difference.estimate.low == pytest.approx(-0.0248, abs=1e-3) and same.verdict == "open"
    assert evaluate_contrasts(contrasts, [*runs[:6], *make_runs("same", [1.005, 2.0, 2.995])])[2].verdict == "level"
    assert wild.verdict == "open"
    assert higher.p == last.p == 1.0  # 2 of 8 sign patterns, times six contrasts
    (one_seed,) = evaluate_contrasts(contrasts[:1], [run for run in runs if run.seed == 0])
    assert one_seed.verdict == "one seed" and one_seed.p is None
    rows = lines(contrasts_table([last, one_seed]))[2:]
    assert rows[0] == ["higher,", "last", "answer", "base", "3", "-0.500", "[-0.748,", "-0.252]", "1", "below"]
    assert rows[1] == ["higher", "base", "1", "+0.500", "one", "seed"]


def test_at_equal_tokens_the_arm_that_generates_more_is_evaluated_at_an_earlier_update() -> None:
    def runs_with_curves(arm: str, tokens: int, reward: float) -> list[StudyRun]:
        runs = make_runs(arm, [9.0, 9.0, 9.0])
        runs = [run._replace(settings=run.settings.model_copy(update={"num_updates": 4})) for run in runs]
        for run in runs:
            run.metrics.clear()
            for update in range(5):
                line: Any = {"update": update, "tokens": tokens * (update > 0)}
                if update % 2 == 0:
                    line["evaluation"] = {"mean": policy_metrics(reward * update + run.seed, 0.0)}
                    line["last_response"] = policy_metrics(reward * update + run.seed + 0.5, 0.0)
                run.metrics.append(line)
        return runs

    contrasts = [
        Contrast(arm="long", of="last", against="short", at="tokens"),
        Contrast(arm="short", against="short", at="tokens"),
    ]
    long, same = evaluate_contrasts(
        contrasts, [*runs_with_curves("short", 10, 1.0), *runs_with_curves("long", 15, 1.5)]
    )
    # 40 tokens are all 4 updates of `short` and 2 updates of `long`, which is evaluated in update 2: 3.5 vs. 4.
    assert long.difference.values == pytest.approx((-0.5, -0.5, -0.5))
    assert same.difference.values == pytest.approx((0.0, 0.0, 0.0))
    stopped = runs_with_curves("long", 15, 1.5)
    del stopped[0].metrics[2:]  # diverged
    (result,) = evaluate_contrasts(contrasts[:1], [*runs_with_curves("short", 10, 1.0), *stopped])
    assert result.difference.seeds == (1, 2)
    row = lines(contrasts_table([long]))[2]
    assert row[:5] == ["long,", "last", "answer,", "equal", "tokens"]


def test_contrasts_are_read_from_a_study_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    head = "base: imdb-tiny-paper\nsettings: {dtype: fp32, test_queries: 9}\narms:\n  one: {}\n  two: {num_agents: 1}\n"
    file.write_text(f"{head}contrasts:\n  - {{arm: two, of: last, against: one}}\n")
    assert load_study(str(file)).contrasts == (Contrast(arm="two", of="last", against="one"),)
