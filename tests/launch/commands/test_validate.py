"""Tests that `cory validate` checks the settings that `cory train` would use."""

import pytest

from launch.main import main

REWARD = "reward=tests.policies.sample_rewards:letters"  # the preset's own reward loads a classifier


@pytest.mark.parametrize(
    "words", [["drafts-tiny-team"], ["imdb-tiny", "num_agents=1", REWARD], ["imdb-tiny", "credit=chain", REWARD]]
)
def test_overrides_are_applied_to_a_preset_as_in_training(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", *words]) == 0, capsys.readouterr().err
    assert "  model family " in capsys.readouterr().out
