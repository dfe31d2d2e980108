"""Runs that start from another run's policies."""

import json
import shutil
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from launch.console.errors import CommandError
from launch.experiments.search import Search, check_same, resolve_start
from launch.experiments.space import pin_objective, read_axes
from launch.main import main
from launch.models.trained import POLICIES, open_trained
from launch.run_folder.checkpoints import BEST
from launch.run_folder.run import Run
from launch.training.start import starting_policies
from policies.settings.error import SettingsError
from policies.settings.settings import Settings, make_settings
from tests.launch.conftest import Cory, record
from tests.launch.training.test_training import BREVITY, SMALL

THEIRS = {"task": "imdb", "advantage": "rloo", "num_generations": 2, "queries_per_update": 4, "minibatch_size": 8}


def _write(folder: Path) -> None:
    (folder / POLICIES / "llm_1").mkdir(parents=True)
    (folder / POLICIES / "llm_1" / "weights").write_text("whole")


@pytest.fixture
def like(tmp_path: Path) -> Settings:
    """Settings that start from the policies of a run of two, which has none but the latest checkpoint."""
    run = record(tmp_path / "run", make_settings(THEIRS), updates=range(2))
    run.checkpoints.save(1, _write)
    return make_settings({**THEIRS, "start_from": str(tmp_path / "run")})


def test_the_best_checkpoint_is_taken_or_else_the_latest(like: Settings, tmp_path: Path) -> None:
    assert starting_policies(like) == tmp_path / "run" / "checkpoints" / "update_000001"
    assert starting_policies(make_settings(THEIRS)) is None
    stored = like.model_copy(update={"start_from": f"file://{tmp_path}/run"})
    assert starting_policies(stored) == tmp_path / "run" / "checkpoints" / "update_000001"


def test_policies_that_consist_of_something_else_are_refused(like: Settings) -> None:
    with pytest.raises(SettingsError, match="that run has weights=full, so its policies do not fit"):
        starting_policies(make_settings({**like.model_dump(), "weights": "lora"}))


def test_one_checkpoint_of_a_run_is_taken_unless_it_is_damaged(like: Settings, tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "update_000001"
    mine = like.model_copy(update={"start_from": str(checkpoint)})
    assert starting_policies(mine) == checkpoint
    (checkpoint / POLICIES / "llm_1" / "weights").write_text("damaged")
    with pytest.raises(CommandError, match=r"update_000001 has a damaged file .*weights\. Name another checkpoint\."):
        starting_policies(mine)


def test_a_search_names_the_checkpoint_that_its_trials_start_from_and_goes_on_with_it(
    like: Settings, tmp_path: Path
) -> None:
    asked = Search(pin_objective(like), read_axes(["lr=1e-4,1e-3"]), None, 1, 1, None)
    search = resolve_start(asked)
    assert search.settings.start_from == str(tmp_path / "run" / "checkpoints" / "update_000001")
    (tmp_path / "found").mkdir()
    search.write(tmp_path / "found", "cory tune")
    check_same(tmp_path / "found", asked)
    other = asked._replace(settings=asked.settings.model_copy(update={"start_from": str(tmp_path / "other")}))
    with pytest.raises(CommandError, match="holds a search with start_from="):
        check_same(tmp_path / "found", other)


@pytest.mark.slow
def test_a_run_starts_from_another_ones_policies_and_keeps_the_model_as_its_reference(
    cory: Cory, tmp_path: Path
) -> None:
    (tmp_path / "my_rewards.py").write_text(BREVITY)
    words = (*SMALL, "num_updates=1", "lr=1e-3", "eval_every=1", "dtype=fp32", "--quiet")
    assert cory("train", *words, "--out", "first").returncode == 0
    (tmp_path / "first" / "checkpoints" / BEST).unlink()  # so that the latest is taken
    begun = cory("train", *words, "start_from=first", "--out", "second")
    assert begun.returncode == 0, begun.stderr
    before, start = open_trained(str(tmp_path / "first"), "1"), open_trained(str(tmp_path / "second"), "0")
    for policy in ("llm_1", "llm_2"):
        given, taken = before.weights(policy), start.weights(policy)
        assert all(np.array_equal(given[name], taken[name]) for name in given)
    lines = [[json.loads(line) for line in (tmp_path / run / "metrics.jsonl").open()] for run in ("first", "second")]
    ends, starts = lines[0][-1]["evaluation"], lines[1][0]["evaluation"]
    assert starts["llm_1"]["kl"] == pytest.approx(ends["llm_1"]["kl"], rel=1e-3) and starts["llm_1"]["kl"] > 1e-4


def test_a_run_trains_with_the_date_that_its_folder_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_model: str
) -> None:
    """Each time that today's date is asked for, it is another day."""
    model = Path(shutil.copytree(small_model, tmp_path / "dated"))
    (model / "chat_template.jinja").write_text(
        "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    )

    class Days(date):
        passed = 0

        @classmethod
        def today(cls) -> "Days":
            cls.passed += 1
            return cls(2030, 1, cls.passed)

    taken: list[Settings] = []

    def note(run: Run, settings: Settings, *_: object, **__: object) -> int:
        assert run.settings().chat_date == settings.chat_date
        taken.append(settings)
        return 0

    monkeypatch.setattr("policies.settings.settings.date", Days)
    monkeypatch.setattr("launch.training.training.train_locked_run", note)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(BREVITY)
    assert main(["train", *SMALL, f"model={model}", "chat=true", "max_prompt_tokens=64", "--out", "run"]) == 0
    assert [settings.chat_date for settings in taken] == ["2030-01-01"]
