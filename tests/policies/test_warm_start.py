"""Tests of `start_from`: an algorithm loads the policies of another run's checkpoint, however it is built."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from ray import tune

from launch.console.configuration import settings_to_yaml
from policies.cory import Cory, CoryConfig
from policies.models.weights import checksum
from policies.settings.error import SettingsError
from policies.settings.settings import Settings
from policies.settings.start import POLICIES, find_start_checkpoint
from tests.paper import make_settings
from tests.policies.conftest import BUNDLED, TINY, MakeCory, ray_session

__all__ = ["ray_session"]

SMALL: dict[str, Any] = {
    **TINY,
    "queries_per_update": 4,
    "minibatch_size": 4,
    "num_epochs": 1,
    "num_updates": 2,
}


@pytest.fixture(scope="module")
def source(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose policies differ from the model and from each other."""
    algorithm = CoryConfig().cory(**{**SMALL, "lr": 1e-3}).build_algo()
    algorithm.train()
    folder = tmp_path_factory.mktemp("source") / "checkpoint"
    algorithm.save_to_path(str(folder))
    algorithm.stop()
    return folder


def checksums(algorithm: Cory) -> list[int]:
    return [checksum(algorithm.weights(policy_id)) for policy_id in algorithm.settings.policy_ids]


def test_an_algorithm_starts_from_the_policies_of_a_checkpoint_with_the_model_as_reference(
    make_cory: MakeCory, source: Path
) -> None:
    untrained = make_cory(**SMALL)
    started = make_cory(**SMALL, start_from=str(source))
    untrained.load_policies(source, 0)
    assert checksums(started) == checksums(untrained) and len(set(checksums(started))) == 2
    metrics = [algorithm.train()["cory"]["policy"]["llm_1"] for algorithm in (started, untrained)]
    assert metrics[0]["kl"] == metrics[1]["kl"] > 1e-3


@pytest.mark.slow
def test_a_trial_of_tune_starts_from_them_too(source: Path, tmp_path: Path, make_cory: MakeCory) -> None:
    config = CoryConfig().cory(**SMALL, start_from=tune.grid_search([None, str(source)]))
    results = tune.Tuner(
        Cory,
        param_space=config,
        run_config=tune.RunConfig(storage_path=str(tmp_path), stop={"num_updates": 1}, verbose=0),
    ).fit()
    without, started = [result.metrics["cory"]["policy"]["llm_1"]["kl"] for result in results]
    assert without == pytest.approx(0.0, abs=1e-5)
    assert started == make_cory(**SMALL, start_from=str(source)).train()["cory"]["policy"]["llm_1"]["kl"]


def test_a_restored_algorithm_does_not_need_the_run_it_started_from(
    make_cory: MakeCory, source: Path, tmp_path: Path
) -> None:
    shutil.copytree(source, tmp_path / "source")
    algorithm = make_cory(**SMALL, start_from=str(tmp_path / "source"))
    algorithm.train()
    saved = algorithm.save(str(tmp_path / "saved"))
    shutil.rmtree(tmp_path / "source")
    expected = algorithm.train()["cory"]["policy"]
    restored = Cory.from_checkpoint(str(tmp_path / "saved"))
    assert restored.train()["cory"]["policy"] == expected
    restored.stop()
    trial = Cory(config=CoryConfig().cory(**SMALL, start_from=str(tmp_path / "source")))  # like Tune
    with pytest.raises(SettingsError, match="source is not a folder on this machine"):
        trial.train()
    trial.restore(saved)
    assert trial.train()["cory"]["policy"] == expected
    trial.stop()


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ("missing", "start_from=missing is not a folder on this machine. Set it to the folder of a run or checkpoint."),
        (".", "start_from=. contains no checkpoint. Set"),
        ("s3://bucket/run", "start_from=s3://bucket/run is a URI. Mount the bucket, or copy the run to a folder"),
    ],
)
def test_a_missing_checkpoint_is_an_error_before_the_algorithm_is_built(
    start: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Cory, "setup", lambda *_: pytest.fail("the algorithm was built"))
    with pytest.raises(SettingsError, match=message):
        CoryConfig().cory(**SMALL, start_from=start).build_algo()


def make_run_folder(folder: Path, settings: Settings, updates: tuple[int, ...], best: str = "") -> Path:
    """Creates a run's folder with empty checkpoints."""
    for update in updates:
        (folder / "checkpoints" / f"update_{update:06d}" / POLICIES).mkdir(parents=True)
    (folder / "config.yaml").write_text(settings_to_yaml(settings))
    if best:
        (folder / "checkpoints" / "best").write_text(best)
    return folder


def test_find_start_returns_the_best_checkpoint_or_else_the_latest(tmp_path: Path) -> None:
    other = make_settings(SMALL)
    run = make_run_folder(tmp_path / "run", other, (8, 10))
    settings = other.model_copy(update={"start_from": str(run)})
    assert find_start_checkpoint(settings) == run / "checkpoints" / "update_000010"
    (run / "checkpoints" / "best").symlink_to("update_000008")
    assert find_start_checkpoint(settings) == run / "checkpoints" / "update_000008"
    copied = make_run_folder(tmp_path / "copied", other, (8, 10), best="update_000008\n")
    assert (
        find_start_checkpoint(other.model_copy(update={"start_from": str(copied)}))
        == copied / "checkpoints" / "update_000008"
    )
    assert find_start_checkpoint(other) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_policies": 1}, "that run has num_policies=2. Set"),
        ({"weights": "lora"}, "that run has weights=full. Set"),
        ({"model": "smollm2", "num_agents": 3}, "that run has model=imdb-gpt2-tiny, num_policies=2. Set"),
        ({"model": ["imdb-gpt2-tiny", "smollm2"]}, "that run has model=imdb-gpt2-tiny. Set"),
        ({"advantage": "gae", "num_generations": 1}, "that run has advantage=rloo. Set"),
    ],
)
def test_policies_of_another_architecture_are_rejected(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    other = {**SMALL, **BUNDLED, "advantage": "rloo", "num_generations": 2, "minibatch_size": 8}
    run = make_run_folder(tmp_path / "run", make_settings(other), (1,))
    with pytest.raises(SettingsError, match=message):
        find_start_checkpoint(make_settings({**other, "start_from": str(run), "minibatch_size": 2, **changes}))
