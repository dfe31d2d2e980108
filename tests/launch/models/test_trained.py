"""Opening checkpoints: choice of the checkpoint, roles, and weights."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from launch.console.errors import CommandError
from launch.models.trained import POLICIES, PolicySet, open_trained
from launch.run_folder import manifest
from launch.run_folder.checkpoints import UNTRAINED
from launch.run_folder.run import Run
from tests.launch.conftest import record_test_run
from tests.paper import paper_settings


def folder_of(trained: PolicySet) -> Path:
    """The checkpoint's folder."""
    assert trained.folder is not None
    return trained.folder


@pytest.fixture
def run(policies_run: Run, tmp_path: Path) -> Run:
    """A copy to be damaged."""
    shutil.copytree(policies_run.path, tmp_path / "run", symlinks=True)
    return Run(tmp_path / "run")


@pytest.mark.parametrize(("checkpoint", "update"), [(None, 5), ("best", 5), ("latest", 6), ("6", 6)])
def test_the_best_checkpoint_is_opened_by_default(policies_run: Run, checkpoint: str | None, update: int) -> None:
    trained = open_trained(policies_run.path, checkpoint)
    assert (trained.update, folder_of(trained).name) == (update, f"update_{update:06d}")
    assert trained.metrics[-1]["update"] == update


def test_the_latest_checkpoint_is_opened_if_there_is_no_best(run: Run) -> None:
    (run.path / "checkpoints" / "best").unlink()
    assert open_trained(run.path).update == 6
    with pytest.raises(CommandError, match=r"no checkpoint `best`\. It has: latest \(6\), 5, 6\."):
        open_trained(run.path, "best")


def test_a_run_without_checkpoints_is_rejected(tmp_path: Path) -> None:
    record_test_run(tmp_path, paper_settings(), updates=[0])
    with pytest.raises(CommandError, match="has no checkpoint yet"):
        open_trained(tmp_path)


def test_a_checkpoint_without_an_entry_in_the_metrics_is_rejected(run: Run) -> None:
    run.metrics_file.cut_after(5)
    with pytest.raises(CommandError, match=r"metrics\.jsonl has no entry for update 6"):
        open_trained(run.path, "latest")


def test_policy_ids_are_in_the_chain_order_of_the_next_update(tmp_path: Path) -> None:
    run = record_test_run(tmp_path, paper_settings(num_agents=3, num_updates=6), updates=range(7))
    for update in (0, 4, 5, 6):
        run.checkpoints.save(update, lambda folder: (folder / "file").touch())
    policy_ids = [open_trained(tmp_path, checkpoint).policy_ids for checkpoint in ("0", "4", "5", "6")]
    first, exchanged = ("llm_1", "llm_2", "llm_3"), ("llm_2", "llm_3", "llm_1")
    assert policy_ids == [first, first, exchanged, exchanged]


def test_weights_do_not_include_the_value_head(policies_run: Run) -> None:
    trained = open_trained(policies_run.path, "6")
    (file,) = (folder_of(trained) / POLICIES / "llm_2").iterdir()
    expected = load_file(file)
    weights = trained.weights("llm_2")
    assert {f"lm.{name}" for name in weights} == {name for name in expected if not name.startswith("value_head.")}
    assert len(expected) == len(weights) + 2
    assert all(np.array_equal(array, expected[f"lm.{name}"]) for name, array in weights.items())
    assert not np.array_equal(weights["transformer.wte.weight"], trained.weights("llm_1")["transformer.wte.weight"])


def test_a_damaged_policy_is_rejected_but_other_damage_is_ignored(run: Run) -> None:
    trained = open_trained(run.path, "6")
    entries = json.loads((folder_of(trained) / manifest.NAME).read_text())
    entries["files"]["optimizer.pkl"] = 1  # does not exist
    (folder_of(trained) / manifest.NAME).write_text(json.dumps(entries))
    assert open_trained(run.path, "6").weights("llm_2")
    (state,) = (folder_of(trained) / POLICIES / "llm_1").iterdir()
    with state.open("r+b") as file:
        file.seek(state.stat().st_size // 2)
        file.write(b"torn")
    with pytest.raises(CommandError, match=r"damaged file .*llm_1.*--checkpoint: best \(5\), latest \(6\), 5, 6\."):
        open_trained(run.path, "6")


def test_a_checkpoint_removed_before_reading_causes_an_error(run: Run) -> None:
    trained = open_trained(run.path, "6")
    shutil.rmtree(folder_of(trained))
    with pytest.raises(CommandError, match=r"was removed by the run\. Try again\."):
        trained.weights("llm_1")


def test_opened_weights_can_be_read_after_the_checkpoint_was_removed(run: Run) -> None:
    weights = open_trained(run.path, "6").weights("llm_1")
    expected = {name: weights[name] for name in weights}
    shutil.rmtree(run.path / "checkpoints")
    assert expected and all(np.array_equal(weights[name], array) for name, array in expected.items())


def test_invalid_weights_files_are_rejected(run: Run) -> None:
    trained = open_trained(run.path, "6")
    (file,) = (folder_of(trained) / POLICIES / "llm_1").iterdir()
    file.write_bytes(b"nothing")
    with pytest.raises(CommandError, match=r"llm_1 does not contain valid weights: "):
        trained.weights("llm_1")


def test_an_unknown_policy_is_rejected(policies_run: Run) -> None:
    with pytest.raises(CommandError, match=r"Unknown policy `llm_3`\. .* has: llm_1, llm_2, mean\."):
        open_trained(policies_run.path).resolve_names(["llm_1", "llm_3"])


@pytest.mark.parametrize(
    ("update", "folder", "is_untrained"), [(0, Path("c"), True), (3, Path("c"), False), (0, None, False)]
)
def test_a_checkpoint_from_before_training_is_a_warning(update: int, folder: Path | None, is_untrained: bool) -> None:
    settings = paper_settings()
    policies = PolicySet(settings, update, [], settings.policy_ids, "run", "run", "", lambda _: {}, folder=folder)
    assert policies.warnings() == [UNTRAINED] * is_untrained
