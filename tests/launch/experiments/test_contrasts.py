"""Contrasts against numbers computed by hand."""

from pathlib import Path
from typing import Any

import pytest

from launch.display.statistics import holm
from launch.experiments.contrasts import Contrast, evaluate_contrasts, contrasts_table
from launch.experiments.results import StudyRun
from launch.experiments.study import load
from tests.launch.experiments.test_tables import lines
from tests.launch.results_of_studies import figures, study_run


def test_holm_corrects_the_smallest_p_for_all_tests_the_next_for_one_less_and_keeps_the_order() -> None:
    found = holm([0.04, 0.01, None, 0.03], 4)
    assert found[2] is None
    assert [p for p in found if p is not None] == pytest.approx([0.09, 0.04, 0.09])  # 0.04 * 2 is below 0.03 * 3
    assert holm([0.5, 0.6], 2) == [1.0, 1.0]
    assert holm([0.01], 6) == pytest.approx([0.06])  # of six that were asked for, one was made


def runs(arm: str, rewards: list[float], last: float | None = None) -> list[StudyRun]:
    made = [study_run(arm, seed, figures(reward, 0.0)) for seed, reward in enumerate(rewards)]
    if last is not None:
        for run, reward in zip(made, rewards, strict=True):
            assert run.final is not None
            run.final["last_response"] = figures(reward + last, 0.0)
    return made


def test_contrasts_are_paired_by_seed_and_say_above_level_open_or_below() -> None:
    found = [
        *runs("base", [1.0, 2.0, 3.0]),
        *runs("higher", [1.5, 2.4, 3.6], last=-1.0),
        *runs("same", [1.01, 2.0, 2.99]),
        *runs("wild", [2.0, 2.0, 2.9]),
    ]
    asked = [
        Contrast(arm="higher", against="base"),
        Contrast(arm="higher", of="last", against="base"),
        Contrast(arm="same", against="base"),
        Contrast(arm="wild", against="base"),
        Contrast(arm="missing", against="base"),
        Contrast(arm="base", of="mean", against="same"),  # has no mean LLM
    ]
    higher, last, same, wild = evaluate_contrasts(asked, found)
    assert higher.difference.values == pytest.approx((0.5, 0.4, 0.6)) and higher.verdict == "above"
    assert last.difference.values == pytest.approx((-0.5, -0.6, -0.4)) and last.verdict == "below"
    assert same.difference.estimate.low == pytest.approx(-0.0248, abs=1e-3) and same.verdict == "open"
    assert evaluate_contrasts(asked, [*found[:6], *runs("same", [1.005, 2.0, 2.995])])[2].verdict == "level"
    assert wild.verdict == "open"
    assert higher.p == last.p == 1.0  # 2 of 8 signs, six times
    (alone,) = evaluate_contrasts(asked[:1], [run for run in found if run.seed == 0])
    assert alone.verdict == "one seed" and alone.p is None
    shown = lines(contrasts_table([last, alone]))[2:]
    assert shown[0] == ["higher,", "last", "answer", "base", "3", "-0.500", "[-0.748,", "-0.252]", "1", "below"]
    assert shown[1] == ["higher", "base", "1", "+0.500", "one", "seed"]


def test_at_equal_tokens_the_arm_that_generates_more_is_asked_earlier() -> None:
    def trained(arm: str, tokens: int, reward: float) -> list[StudyRun]:
        made = runs(arm, [9.0, 9.0, 9.0])
        made = [run._replace(settings=run.settings.model_copy(update={"num_updates": 4})) for run in made]
        for run in made:
            run.metrics.clear()
            for update in range(5):
                line: Any = {"update": update, "tokens": tokens * (update > 0)}
                if update % 2 == 0:
                    line["evaluation"] = {"mean": figures(reward * update + run.seed, 0.0)}
                    line["last_response"] = figures(reward * update + run.seed + 0.5, 0.0)
                run.metrics.append(line)
        return made

    asked = [
        Contrast(arm="long", of="last", against="short", at="tokens"),
        Contrast(arm="short", against="short", at="tokens"),
    ]
    long, same = evaluate_contrasts(asked, [*trained("short", 10, 1.0), *trained("long", 15, 1.5)])
    # 40 tokens are all 4 updates of the one, and 2 of the other, of which the second was evaluated: 3.5 against 4.
    assert long.difference.values == pytest.approx((-0.5, -0.5, -0.5))
    assert same.difference.values == pytest.approx((0.0, 0.0, 0.0))
    stopped = trained("long", 15, 1.5)
    del stopped[0].metrics[2:]  # diverged
    (left,) = evaluate_contrasts(asked[:1], [*trained("short", 10, 1.0), *stopped])
    assert left.difference.seeds == (1, 2)
    shown = lines(contrasts_table([long]))[2]
    assert shown[:5] == ["long,", "last", "answer,", "equal", "tokens"]


def test_a_study_s_file_has_its_contrasts(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    head = "base: imdb-tiny-paper\nsettings: {dtype: fp32, test_queries: 9}\narms:\n  one: {}\n  two: {num_agents: 1}\n"
    file.write_text(f"{head}contrasts:\n  - {{arm: two, of: last, against: one}}\n")
    assert load(str(file)).contrasts == (Contrast(arm="two", of="last", against="one"),)
