"""Tests of the public package: lazy imports and error messages."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cory_rllib
from cory_rllib import CommandError, CoryConfig, SettingsError, evaluate, export, load_run
from tests.launch.conftest import record_test_run
from tests.paper import paper_settings

PRINT_IMPORTED = "import sys, {module}; print(*sorted({{'ray', 'torch', 'vllm', 'transformers'}} & set(sys.modules)))"


@pytest.mark.parametrize("module", ["cory_rllib", "policies.settings.files"])
def test_the_package_and_its_presets_import_no_heavy_libraries(module: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", PRINT_IMPORTED.format(module=module)], capture_output=True, text=True
    )
    assert (process.stdout.strip(), process.stderr) == ("", "")


def test_every_public_name_can_be_imported_and_has_a_docstring() -> None:
    assert sorted(cory_rllib.__all__) == cory_rllib.__all__ and set(cory_rllib.__all__) <= set(dir(cory_rllib))
    for name in cory_rllib.__all__:
        assert getattr(cory_rllib, name).__doc__, name
    with pytest.raises(AttributeError, match="module 'cory_rllib' has no attribute 'trian'"):
        _ = cory_rllib.trian


def test_a_preset_has_the_same_settings_as_on_the_command_line() -> None:
    from launch.console.configuration import resolve_settings

    config = CoryConfig.from_preset("imdb-tiny", num_agents=1, lr=1e-3)
    assert config.settings == resolve_settings("imdb-tiny", [], ["num_agents=1", "lr=1e-3"])
    assert CoryConfig().settings == resolve_settings(None, [], [])  # the same defaults everywhere


def test_invalid_names_and_values_have_clear_messages() -> None:
    with pytest.raises(SettingsError, match=r"^Unknown preset `imdb-tinny`\. Did you mean `imdb-tiny`\?"):
        CoryConfig.from_preset("imdb-tinny")
    with pytest.raises(SettingsError, match=r"^Unknown setting `learning_rate`\."):
        CoryConfig.from_preset("imdb-tiny", learning_rate=1e-5)
    with pytest.raises(SettingsError, match=r"^Setting `lr`=-1: Input should be greater than 0\.$"):
        _ = CoryConfig.from_preset("imdb-tiny", lr=-1).settings
    with pytest.raises(CommandError, match=r"^nowhere is not a run's folder: it does not exist"):
        load_run("nowhere")
    with pytest.raises(CommandError, match=r"^nowhere is not a run's folder"):
        export("nowhere", "model")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out": "s3://bucket/figures"}, "s3://bucket/figures is a URI, but the evaluation requires a local folder"),
        ({"queries": 0}, "queries=0 must be at least 1."),
        ({"samples": -1}, "samples=-1 must be at least 1."),
    ],
)
def test_an_evaluation_with_invalid_options_raises_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = record_test_run(tmp_path / "run", paper_settings(backend="transformers", num_runners=0), updates=range(2))
    run.checkpoints.save(1, lambda folder: (folder / "file").touch())
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CommandError, match=message):
        evaluate(run.path, **options)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_export_to_a_uri_raises_and_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError, match=r"^s3://bucket/model is a URI, but the model requires a local folder"):
        export("nowhere", "s3://bucket/model")
    assert not list(tmp_path.iterdir())


def test_a_run_shows_its_curves_in_notebooks_once_they_exist(tmp_path: Path) -> None:
    folder = record_test_run(tmp_path, paper_settings(), updates=range(2))
    run = load_run(tmp_path)
    assert run._repr_png_() is None
    folder.curves.write_bytes(b"a picture")
    assert run._repr_png_() == b"a picture"
