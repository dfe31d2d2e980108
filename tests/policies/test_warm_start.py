"""`start_from`: the algorithm itself takes the policies of another run's checkpoint, on every path that builds it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from ray import tune

from launch.console.configuration import as_yaml
from policies.cory import Cory, CoryConfig
from policies.models.weights import checksum
from policies.settings.error import SettingsError
from policies.settings.settings import Settings, make_settings
from policies.settings.start import POLICIES, find_start
from tests.policies.conftest import TINY, MakeCory, ray_session

__all__ = ["ray_session"]

SMALL: dict[str, Any] = {**TINY, "queries_per_update": 4, "minibatch_size": 4, "num_epochs": 1, "num_updates": 2}


@pytest.fixture(scope="module")
def source(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose policies differ from the model and from each other."""
    algorithm = CoryConfig().cory(**{**SMALL, "lr": 1e-3}).build_algo()
    algorithm.train()
    folder = tmp_path_factory.mktemp("source") / "checkpoint"
    algorithm.save_to_path(str(folder))
    algorithm.stop()
    return folder


def sums(algorithm: Cory) -> list[int]:
    return [checksum(algorithm.weights(name)) for name in algorithm.settings.policy_ids]


def test_an_algorithm_starts_from_the_policies_of_a_checkpoint_and_keeps_the_model_as_its_reference(
    make_cory: MakeCory, source: Path
) -> None:
    untrained = make_cory(**SMALL)
    started = make_cory(**SMALL, start_from=str(source))
    untrained.load_policies(source, 0)
    assert sums(started) == sums(untrained) and len(set(sums(started))) == 2
    figures = [algorithm.train()["cory"]["policy"]["llm_1"] for algorithm in (started, untrained)]
    assert figures[0]["kl"] == figures[1]["kl"] > 0.1


@pytest.mark.slow
def test_a_trial_of_a_tuner_starts_from_them_too(source: Path, tmp_path: Path, make_cory: MakeCory) -> None:
    config = CoryConfig().cory(**SMALL, start_from=tune.grid_search([None, str(source)]))
    fitted = tune.Tuner(
        Cory,
        param_space=config,
        run_config=tune.RunConfig(storage_path=str(tmp_path), stop={"num_updates": 1}, verbose=0),
    ).fit()
    without, started = [result.metrics["cory"]["policy"]["llm_1"]["kl"] for result in fitted]
    assert without == pytest.approx(0.0, abs=1e-5)
    assert started == make_cory(**SMALL, start_from=str(source)).train()["cory"]["policy"]["llm_1"]["kl"]


def test_what_is_restored_does_not_need_the_run_that_it_started_from(
    make_cory: MakeCory, source: Path, tmp_path: Path
) -> None:
    shutil.copytree(source, tmp_path / "source")
    algorithm = make_cory(**SMALL, start_from=str(tmp_path / "source"))
    algorithm.train()
    saved = algorithm.save(str(tmp_path / "saved"))
    shutil.rmtree(tmp_path / "source")
    on = algorithm.train()["cory"]["policy"]
    restored = Cory.from_checkpoint(str(tmp_path / "saved"))
    assert restored.train()["cory"]["policy"] == on
    restored.stop()
    trial = Cory(config=CoryConfig().cory(**SMALL, start_from=str(tmp_path / "source")))  # as Tune builds it
    with pytest.raises(SettingsError, match="source is no folder on this machine"):
        trial.train()
    trial.restore(saved)
    assert trial.train()["cory"]["policy"] == on
    trial.stop()


@pytest.mark.parametrize(
    ("start", "says"),
    [
        ("missing", "start_from=missing is no folder on this machine. Name the folder of a run, or of one of its ch"),
        (".", "start_from=. holds no checkpoint. Name"),
        ("s3://bucket/run", "start_from=s3://bucket/run is a URI, which only `cory train` and `cory study` read."),
    ],
)
def test_what_is_no_checkpoint_is_refused_before_anything_is_built(
    start: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Cory, "setup", lambda *_: pytest.fail("something was built"))
    with pytest.raises(SettingsError, match=says):
        CoryConfig().cory(**SMALL, start_from=start).build_algo()


def recorded(folder: Path, settings: Settings, updates: tuple[int, ...], best: str = "") -> Path:
    """A run's folder with empty checkpoints."""
    for update in updates:
        (folder / "checkpoints" / f"update_{update:06d}" / POLICIES).mkdir(parents=True)
    (folder / "config.yaml").write_text(as_yaml(settings))
    if best:
        (folder / "checkpoints" / "best").write_text(best)
    return folder


def test_the_best_checkpoint_of_a_run_is_taken_or_else_the_latest(tmp_path: Path) -> None:
    theirs = make_settings(SMALL)
    run = recorded(tmp_path / "run", theirs, (8, 10))
    mine = theirs.model_copy(update={"start_from": str(run)})
    assert find_start(mine) == run / "checkpoints" / "update_000010"
    (run / "checkpoints" / "best").symlink_to("update_000008")
    assert find_start(mine) == run / "checkpoints" / "update_000008"
    copied = recorded(tmp_path / "copied", theirs, (8, 10), best="update_000008\n")
    assert find_start(theirs.model_copy(update={"start_from": str(copied)})) == copied / "checkpoints" / "update_000008"
    assert find_start(theirs) is None


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"num_policies": 1}, "that run has num_policies=2, so"),
        ({"weights": "lora"}, "that run has weights=full, so"),
        ({"model": "smollm2", "num_agents": 3}, "that run has model=imdb-gpt2-tiny, num_policies=2, so"),
        ({"model": ["imdb-gpt2-tiny", "smollm2"]}, "that run has model=imdb-gpt2-tiny, so"),
        ({"advantage": "gae", "num_generations": 1}, "that run has advantage=rloo, so"),
        (
            {"advantage": "gae", "num_generations": 1, "critic_inputs": "chain"},
            "that run has critic_inputs=tokens, adv",
        ),
    ],
)
def test_policies_that_consist_of_something_else_are_refused(
    changes: dict[str, Any], differs: str, tmp_path: Path
) -> None:
    theirs = {**SMALL, "advantage": "rloo", "num_generations": 2, "minibatch_size": 8}
    run = recorded(tmp_path / "run", make_settings(theirs), (1,))
    with pytest.raises(SettingsError, match=differs):
        find_start(make_settings({**theirs, "start_from": str(run), "minibatch_size": 2, **changes}))


def test_a_critic_of_a_chain_of_another_length_is_refused(tmp_path: Path) -> None:
    theirs = {**SMALL, "critic_inputs": "chain", "num_agents": 3, "num_policies": 1, "minibatch_size": 2}
    run = recorded(tmp_path / "run", make_settings(theirs), (1,))
    with pytest.raises(SettingsError, match="that run has num_agents=3, so its policies do not fit"):
        find_start(make_settings({**theirs, "num_agents": 2, "start_from": str(run)}))
