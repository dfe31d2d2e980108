"""`cory validate` looks at what `cory train` would train with."""

import pytest

from launch.main import main

OTHER = "reward=tests.policies.sample_rewards:letters"  # the preset's own loads a classifier, as `validate imdb` does


@pytest.mark.parametrize(
    "words", [["drafts-tiny-team"], ["imdb-tiny", "num_agents=1", OTHER], ["imdb-tiny", "credit=chain", OTHER]]
)
def test_a_preset_is_put_together_as_for_training(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", *words]) == 0, capsys.readouterr().err
    assert "  model family " in capsys.readouterr().out
