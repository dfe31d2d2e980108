"""Runs that start from another run's policies."""

import json
import shutil
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from launch.console.errors import CommandError
from launch.experiments.search import Search, pin_start_checkpoint, read_same_search
from launch.experiments.space import pin_objective, read_axes
from launch.main import main
from launch.models.trained import POLICIES, open_trained
from launch.run_folder.checkpoints import BEST
from launch.run_folder.run import Run
from launch.training.start import starting_policies
from launch.training.training import Trainer
from policies.settings.error import SettingsError
from policies.settings.settings import Settings
from tests.launch.conftest import Cory, record_test_run
from tests.launch.training.test_training import BREVITY, SMALL
from tests.paper import make_settings

VALUES = {"task": "imdb", "advantage": "rloo", "num_generations": 2, "queries_per_update": 4, "minibatch_size": 8}


def _write(folder: Path) -> None:
    (folder / POLICIES / "llm_1").mkdir(parents=True)
    (folder / POLICIES / "llm_1" / "weights").write_text("whole")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings that start from the policies of a run with a single checkpoint."""
    run = record_test_run(tmp_path / "run", make_settings(VALUES), updates=range(2))
    run.checkpoints.save(1, _write)
    return make_settings({**VALUES, "start_from": str(tmp_path / "run")})


def test_start_from_uses_the_best_or_else_the_latest_checkpoint(settings: Settings, tmp_path: Path) -> None:
    assert starting_policies(settings) == tmp_path / "run" / "checkpoints" / "update_000001"
    assert starting_policies(make_settings(VALUES)) is None


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_a_run_that_fails_before_its_first_record_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    def fail(*_: object) -> int:
        raise CommandError("No GPU.")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(Trainer, "train", fail)
    words = ["imdb-tiny", "backend=transformers", "num_runners=0", "--out", f"{prefix}{tmp_path}/run"]
    assert main(["train", *words]) == 2
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_policies_with_other_settings_are_rejected(settings: Settings) -> None:
    with pytest.raises(SettingsError, match=r"that run has weights=full\. Set the same here"):
        starting_policies(make_settings({**settings.model_dump(), "weights": "lora"}))


def test_start_from_accepts_a_checkpoint_unless_it_is_damaged(settings: Settings, tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "update_000001"
    from_checkpoint = settings.model_copy(update={"start_from": str(checkpoint)})
    assert starting_policies(from_checkpoint) == checkpoint
    (checkpoint / POLICIES / "llm_1" / "weights").write_text("damaged")
    with pytest.raises(CommandError, match=r"update_000001 has a damaged file .*weights\. Choose another checkpoint\."):
        starting_policies(from_checkpoint)


def test_a_search_pins_start_from_to_a_checkpoint_and_continues_with_it(settings: Settings, tmp_path: Path) -> None:
    requested = Search(pin_objective(settings), read_axes(["lr=1e-4,1e-3"]))
    search = pin_start_checkpoint(requested)
    assert search.settings.start_from == str(tmp_path / "run" / "checkpoints" / "update_000001")
    (tmp_path / "search").mkdir()
    search.write(tmp_path / "search", "cory tune")
    assert read_same_search(tmp_path / "search", requested) == search
    other = requested._replace(settings=requested.settings.model_copy(update={"start_from": str(tmp_path / "other")}))
    with pytest.raises(CommandError, match="contains a search with start_from="):
        read_same_search(tmp_path / "search", other)


@pytest.mark.slow
def test_start_from_copies_policies_and_keeps_the_model_as_reference(cory: Cory, tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(BREVITY)
    words = (*SMALL, "num_updates=1", "lr=1e-3", "eval_every=1", "dtype=fp32", "--quiet")
    assert cory("train", *words, "--out", "first").returncode == 0
    (tmp_path / "first" / "checkpoints" / BEST).unlink()  # so that the latest is used
    result = cory("train", *words, "start_from=first", "--out", "second")
    assert result.returncode == 0, result.stderr
    before, start = open_trained(str(tmp_path / "first"), "1"), open_trained(str(tmp_path / "second"), "0")
    for policy in ("llm_1", "llm_2"):
        source, copy = before.weights(policy), start.weights(policy)
        assert all(np.array_equal(source[name], copy[name]) for name in source)
    lines = [[json.loads(line) for line in (tmp_path / run / "metrics.jsonl").open()] for run in ("first", "second")]
    last, first = lines[0][-1]["evaluation"], lines[1][0]["evaluation"]
    assert first["llm_1"]["kl"] == pytest.approx(last["llm_1"]["kl"], rel=1e-3) and first["llm_1"]["kl"] > 1e-4


def test_a_run_trains_with_its_recorded_chat_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_model: str
) -> None:
    """A run trains with the date in its folder, although each call of `today` returns a later day."""
    model = Path(shutil.copytree(small_model, tmp_path / "dated"))
    (model / "chat_template.jinja").write_text(
        "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    )

    class ChangingDate(date):
        calls = 0

        @classmethod
        def today(cls) -> "ChangingDate":
            cls.calls += 1
            return cls(2030, 1, cls.calls)

    used_settings: list[Settings] = []

    def record_settings(run: Run, settings: Settings, *_: object, **__: object) -> int:
        assert run.settings.chat_date == settings.chat_date
        used_settings.append(settings)
        return 0

    monkeypatch.setattr("policies.settings.resolve.date", ChangingDate)
    monkeypatch.setattr("launch.training.training.train_locked_run", record_settings)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(BREVITY)
    assert main(["train", *SMALL, f"model={model}", "chat=true", "max_prompt_tokens=64", "--out", "run"]) == 0
    assert [settings.chat_date for settings in used_settings] == ["2030-01-01"]
