"""The settings in which the arms of a contrast differ, and which of them are marked."""

from pathlib import Path

import pytest

from launch.console.errors import CommandError
from launch.experiments.arm_differences import MARK, MARKED, arm_differences, optimizer_steps
from launch.experiments.contrasts import Contrast, differences_text, evaluate_contrasts
from launch.experiments.study import Study, bundled_studies, load_study
from tests.launch.results_of_studies import policy_metrics, study_run

ARMS = """
base: imdb-tiny-paper
settings: {dtype: fp32, test_queries: 9}
arms:
  base: {}
  fast: {lr: 1.0e-3}
  long: {num_updates: 90}
  large: {queries_per_update: 256}
  large-batch: {queries_per_update: 256, minibatch_size: 128}
  thorough: {num_epochs: 8, minibatch_size: 128}
  linear: {lr_schedule: linear, warmup_updates: 3}
  own: {partner_reward: 0.0}
"""


def a_study(folder: Path, *contrasts: str) -> Study:
    file = folder / "mine.yaml"
    file.write_text("\n".join([ARMS, "contrasts:", *(f"  - {{{contrast}}}" for contrast in contrasts)]))
    return load_study(str(file))


def differences(study: Study, arm: str, against: str = "base") -> list[str]:
    return arm_differences(study.settings(study.arms[arm], 0), study.settings(study.arms[against], 1))


def test_another_amount_of_training_is_marked_and_other_settings_are_listed(tmp_path: Path) -> None:
    study = a_study(tmp_path, "arm: fast, against: base")
    base = study.settings(study.arms["base"], 0)  # 45 updates of 128 queries; 4 epochs in mini-batches of 64
    assert optimizer_steps(base) == 45 * base.num_epochs * 2
    assert differences(study, "base") == []
    assert differences(study, "fast") == ["⚠ lr differs: 0.001 vs. 0.0002"]
    assert differences(study, "own") == ["partner_reward 0.0 vs. 1.0"]
    assert differences(study, "large-batch") == ["minibatch_size 128 vs. 64", "queries_per_update 256 vs. 128"]
    steps, double = optimizer_steps(base), 2 * optimizer_steps(base)
    assert differences(study, "large") == [
        f"⚠ number of optimizer steps per LLM differs: {double} vs. {steps}",
        "queries_per_update 256 vs. 128",
    ]
    assert differences(study, "long")[0] == f"⚠ number of optimizer steps per LLM differs: {double} vs. {steps}"
    epochs = base.num_epochs
    assert differences(study, "thorough")[0] == f"⚠ num_epochs differs: 8 vs. {epochs}"
    assert differences(study, "linear") == [
        "⚠ lr_schedule differs: linear vs. constant",
        "⚠ warmup_updates differs: 3 vs. 0",
    ]


def test_a_contrast_may_allow_a_difference_but_only_that(tmp_path: Path) -> None:
    allowed, partly, marked = (
        f"arm: {arm}, against: base{allow}"
        for arm, allow in (("fast", ", allow: [lr]"), ("linear", ", allow: [warmup_updates]"), ("fast", ""))
    )
    text = a_study(tmp_path, allowed, partly, marked).differences_text().split("\n")[1:]
    assert text[0] == "  fast vs. base: lr 0.001 vs. 0.0002 (allowed)"
    assert text[1] == "  linear vs. base: ⚠ lr_schedule differs: linear vs. constant; warmup_updates 3 vs. 0 (allowed)"
    assert text[2] == "  fast vs. base: ⚠ lr differs: 0.001 vs. 0.0002"
    with pytest.raises(CommandError, match=r"contrasts\.0\.allow\.0 'learning_rate': Input should be 'lr', 'lr_sched"):
        a_study(tmp_path, "arm: fast, against: base, allow: [learning_rate]")


def test_results_list_the_settings_that_their_runs_had() -> None:
    runs = [study_run("slow", seed, policy_metrics(1.0, 0.0), lr=3e-5, num_runners=1) for seed in range(2)]
    runs += [study_run("base", seed, policy_metrics(0.5, 0.0)) for seed in range(2)]
    contrasts = [Contrast(arm="slow", against="base"), Contrast(arm="slow", against="base", at="tokens")]
    lines = differences_text(evaluate_contrasts(contrasts[:1], runs)).split("\n")
    assert lines[1:] == ["  slow vs. base: ⚠ lr differs: 3e-05 vs. 0.0002"]  # not num_runners
    (allowed,) = evaluate_contrasts([Contrast(arm="slow", against="base", allow=MARKED)], runs)
    assert allowed.arm_differences == ["lr 3e-05 vs. 0.0002 (allowed)"]


@pytest.mark.parametrize("name", bundled_studies())
def test_no_contrast_of_a_bundled_study_has_a_difference_that_it_does_not_allow(name: str) -> None:
    study = load_study(name)
    assert not study.contrasts or MARK not in study.differences_text().partition("\n")[2]
