"""`--over`, and the definition of a search."""

from pathlib import Path

import pytest

from launch.console.errors import CommandError
from launch.experiments.search import Search
from launch.experiments.space import grid_points, pin_objective, read_axes
from policies.settings.error import SettingsError
from tests.paper import make_settings, paper_settings
from tests.policies.settings.test_yaml12 import AWKWARD_TEXTS

SETTINGS = paper_settings(num_updates=9, eval_every=1, kl_coef=0.1)


def test_values_are_parsed_as_a_yaml_list() -> None:
    options = ["exchange_period=1,5,null", "kl_coef=0.0,0.5", "chat=true,false", "model=[small, large],large"]
    assert read_axes(options) == {
        "exchange_period": [1, 5, None],
        "kl_coef": [0.0, 0.5],
        "chat": [True, False],
        "model": [["small", "large"], "large"],
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["exchange_perod=1,2"], "Unknown setting `exchange_perod` in --over. Did you mean `exchange_period`?"),
        (["lr"], "has no values"),
        (["lr="], "has no values"),
        (["lr=1e-5,0.00001"], "contains a value twice"),
        (["lr=1e-5", "lr=1e-4"], "--over lr is given twice"),
        (["num_updates=10,20"], "trials that differ in it"),
        (["model=[a,b"], "is not a valid YAML list"),
        (["eval_kl_coef=0,1"], "trials that differ in it"),
    ],
)
def test_an_invalid_axis_is_rejected_with_a_one_line_message(options: list[str], message: str) -> None:
    with pytest.raises((CommandError, SettingsError)) as error:
        read_axes(options)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_every_point_of_a_search_must_have_valid_settings() -> None:
    valid_axes = read_axes(["num_agents=1,2", "minibatch_size=64,128"])
    assert len(grid_points(SETTINGS, valid_axes)) == 4
    with pytest.raises(CommandError, match="--over exchange_period=0: Setting `exchange_period`=0: Input should be"):
        grid_points(SETTINGS, read_axes(["exchange_period=5,0"]))
    with pytest.raises(
        CommandError, match=r"--over minibatch_size=100: minibatch_size=100 does not divide the 256 resp"
    ):
        grid_points(SETTINGS, read_axes(["minibatch_size=64,100"]))
    with pytest.raises(CommandError, match="--over lora_rank=8: lora_rank=8 requires weights=lora"):
        grid_points(SETTINGS, read_axes(["lora_rank=8,16"]))
    with pytest.raises(CommandError, match=r"--over lr=log:1e-6:1e-4: Setting `lr`=.*: Input should be a valid number"):
        grid_points(SETTINGS, read_axes(["lr=log:1e-6:1e-4"]))
    with pytest.raises(CommandError, match="--over num_agents=1: average_period=5 requires two or more LLMs"):
        grid_points(paper_settings(average_period=5), read_axes(["num_agents=1,2"]))


def test_the_objective_keeps_the_kl_coef_from_before_the_search() -> None:
    for settings in grid_points(pin_objective(SETTINGS), read_axes(["kl_coef=0,0.9"])):
        assert settings.report_kl_coef == 0.1


def test_a_search_is_read_back_unchanged(tmp_path: Path) -> None:
    search = Search(pin_objective(SETTINGS), read_axes(["exchange_period=1,2,null", "lr=1e-6,1e-4,3e-4"]), 2)
    assert search.trials == 9
    search.write(tmp_path, "cory tune")
    assert Search.read(tmp_path) == search
    with pytest.raises(CommandError, match=r"search\.yaml is not a valid search: .*No such file"):
        Search.read(tmp_path.parent)


def test_a_search_of_an_earlier_version_is_rejected(tmp_path: Path) -> None:
    Search(SETTINGS, read_axes(["lr=1e-5,1e-4"])).write(tmp_path, "cory tune")
    with (tmp_path / "search.yaml").open("a") as file:
        file.write("  num_siblings: 2\n")
    with pytest.raises(CommandError, match=r"of an earlier version, with other settings\. Start it again"):
        Search.read(tmp_path)


def test_a_quoted_text_with_a_comma_is_one_value() -> None:
    axes = read_axes(["""lora_target_modules='q_proj,v_proj', "it's, k",o_proj,null"""])
    assert axes == {"lora_target_modules": ["q_proj,v_proj", "it's, k", "o_proj", None]}


@pytest.mark.parametrize("text", AWKWARD_TEXTS)
def test_a_search_with_awkward_texts_is_read_back_unchanged(text: str, tmp_path: Path) -> None:
    search = Search(SETTINGS.model_copy(update={"prompt": text}), {"stop": [text, "other", None]})
    search.write(tmp_path, "cory tune")
    assert Search.read(tmp_path) == search


def test_trials_get_absolute_paths_also_of_searched_files(tmp_path: Path) -> None:
    settings = make_settings({"task": "custom", "data": "a.jsonl", "reward": "a:b", "backend": "transformers"})
    search = Search(settings, read_axes(["data=a.jsonl,b.jsonl", "lr=1e-5,1e-4"]))
    space = search.space(lambda settings: settings.model_copy(update={"data": f"/data/{settings.data}"}))
    assert space["data"] == {"grid_search": ["/data/a.jsonl", "/data/b.jsonl"]}
    assert space["lr"] == {"grid_search": [1e-5, 1e-4]}
    search = search._replace(axes={"lr": [1e-5]})
    assert search.space(lambda settings: settings.model_copy(update={"data": "/data/a"}))["data"] == "/data/a"
