"""Which checkpoint is opened, who plays which role in it, and what is read from it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from launch.console.errors import CommandError
from launch.models.trained import POLICIES, PolicySet, open_trained
from launch.run_folder import manifest
from launch.run_folder.run import Run
from policies.settings.settings import Settings
from tests.launch.conftest import record


def folder_of(trained: PolicySet) -> Path:
    """The checkpoint's folder."""
    assert trained.folder is not None
    return trained.folder


@pytest.fixture
def run(policies_run: Run, tmp_path: Path) -> Run:
    """A copy to be damaged."""
    shutil.copytree(policies_run.path, tmp_path / "run", symlinks=True)
    return Run(tmp_path / "run")


@pytest.mark.parametrize(("wanted", "update"), [(None, 5), ("best", 5), ("latest", 6), ("6", 6)])
def test_the_best_checkpoint_is_opened_or_the_one_that_was_asked_for(
    policies_run: Run, wanted: str | None, update: int
) -> None:
    trained = open_trained(policies_run.path, wanted)
    assert (trained.update, folder_of(trained).name) == (update, f"update_{update:06d}")
    assert trained.lines[-1]["update"] == update


def test_the_latest_is_opened_where_none_is_the_best(run: Run) -> None:
    (run.path / "checkpoints" / "best").unlink()
    assert open_trained(run.path).update == 6
    with pytest.raises(CommandError, match=r"no checkpoint `best`\. It has: latest \(6\), 5, 6\."):
        open_trained(run.path, "best")


def test_a_run_without_checkpoints_is_refused(tmp_path: Path) -> None:
    record(tmp_path, Settings(), updates=[0])
    with pytest.raises(CommandError, match="has no checkpoint yet"):
        open_trained(tmp_path)


def test_a_checkpoint_that_the_metrics_do_not_know_is_refused(run: Run) -> None:
    run.metrics.cut_after(5)
    with pytest.raises(CommandError, match=r"metrics\.jsonl has no line of update 6"):
        open_trained(run.path, "latest")


def test_the_policies_play_the_roles_that_the_next_update_would_have_given_them(tmp_path: Path) -> None:
    run = record(tmp_path, Settings(num_agents=3, num_updates=6), updates=range(7))
    for update in (0, 4, 5, 6):
        run.checkpoints.save(update, lambda folder: (folder / "file").touch())
    policy_ids = [open_trained(tmp_path, wanted).policy_ids for wanted in ("0", "4", "5", "6")]
    first, exchanged = ("llm_1", "llm_2", "llm_3"), ("llm_2", "llm_3", "llm_1")
    assert policy_ids == [first, first, exchanged, exchanged]


def test_the_weights_are_those_of_the_module_without_its_value_head(policies_run: Run) -> None:
    trained = open_trained(policies_run.path, "6")
    (file,) = (folder_of(trained) / POLICIES / "llm_2").iterdir()
    expected = load_file(file)
    weights = trained.weights("llm_2")
    assert {f"lm.{name}" for name in weights} == {name for name in expected if not name.startswith("value_head.")}
    assert len(expected) == len(weights) + 2
    assert all(np.array_equal(array, expected[f"lm.{name}"]) for name, array in weights.items())
    assert not np.array_equal(weights["transformer.wte.weight"], trained.weights("llm_1")["transformer.wte.weight"])


def test_a_damaged_policy_is_refused_with_the_checkpoints_there_are_and_other_damage_does_not_matter(
    run: Run,
) -> None:
    trained = open_trained(run.path, "6")
    entries = json.loads((folder_of(trained) / manifest.NAME).read_text())
    entries["files"]["optimizer.pkl"] = 1  # which is not there
    (folder_of(trained) / manifest.NAME).write_text(json.dumps(entries))
    assert open_trained(run.path, "6").weights("llm_2")
    (state,) = (folder_of(trained) / POLICIES / "llm_1").iterdir()
    with state.open("r+b") as file:
        file.seek(state.stat().st_size // 2)
        file.write(b"torn")
    with pytest.raises(CommandError, match=r"damaged file .*llm_1.*--checkpoint: best \(5\), latest \(6\), 5, 6\."):
        open_trained(run.path, "6")


def test_a_checkpoint_that_the_run_removed_meanwhile_is_one_sentence(run: Run) -> None:
    trained = open_trained(run.path, "6")
    shutil.rmtree(folder_of(trained))
    with pytest.raises(CommandError, match=r"was removed meanwhile\. Try again\."):
        trained.weights("llm_1")


def test_weights_that_were_opened_can_be_read_after_the_run_has_removed_the_checkpoint(run: Run) -> None:
    weights = open_trained(run.path, "6").weights("llm_1")
    expected = {name: weights[name] for name in weights}
    shutil.rmtree(run.path / "checkpoints")
    assert expected and all(np.array_equal(weights[name], array) for name, array in expected.items())


def test_files_that_hold_no_weights_are_refused(run: Run) -> None:
    trained = open_trained(run.path, "6")
    (file,) = (folder_of(trained) / POLICIES / "llm_1").iterdir()
    file.write_bytes(b"nothing")
    with pytest.raises(CommandError, match=r"llm_1 does not hold a policy's weights: .* It was not read\."):
        trained.weights("llm_1")


def test_a_policy_that_there_is_not_is_refused_with_those_there_are(policies_run: Run) -> None:
    with pytest.raises(CommandError, match=r"no policy `llm_3`\. Its policies are: llm_1, llm_2, mean\."):
        open_trained(policies_run.path).named(["llm_1", "llm_3"])
