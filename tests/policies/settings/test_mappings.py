"""Settings that are mappings: `chat_template_kwargs` and `thinking`."""

from pathlib import Path

import pytest

from cory_env.chain_settings import Thinking
from launch.console.configuration import parse_overrides, resolve_settings, settings_to_yaml
from launch.evaluation.target import target_settings
from policies.cory import CoryConfig
from policies.settings.error import SettingsError
from policies.settings.settings import Settings
from policies.settings.yaml12 import to_cli
from tests.paper import PAPER, make_settings

WORDS = ["chat=true", "chat_template_kwargs={enable_thinking: false}", "thinking={start: <think>, end: </think>}"]
TAGS = {"start": "<think>", "end": "</think>"}


def check(settings: Settings) -> None:
    assert settings.chat_template_kwargs == {"enable_thinking": False}
    assert settings.thinking == Thinking("<think>", "</think>")


def test_they_are_given_as_yaml_on_the_command_line_and_in_files(tmp_path: Path) -> None:
    settings = resolve_settings("imdb-tiny", [], WORDS)
    check(settings)
    check(resolve_settings("imdb-tiny", [], [*WORDS[:2], 'thinking={"start": "<think>", "end": "</think>"}']))
    (file := tmp_path / "t.yaml").write_text(settings_to_yaml(settings))
    assert resolve_settings("imdb-tiny", [file], []) == settings
    values = parse_overrides(WORDS)
    assert parse_overrides([f"{name}={to_cli(value)}" for name, value in values.items()]) == values
    assert parse_overrides(["system_prompt={a: b}", "thinking=null"]) == {"system_prompt": "{a: b}", "thinking": None}


def test_they_reach_the_algorithm_and_the_environment(small_model: str) -> None:
    values = {**PAPER, "backend": "transformers", "num_runners": 0, "thinking": Thinking("the", "a")}
    config = CoryConfig().cory(**values)
    config.validate()
    assert config.settings.thinking == config.env_config["thinking"] == Thinking("the", "a")
    assert make_settings(config.settings.model_dump()) == config.settings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs={a: 1} requires chat=true. Set that, or"),
        ({"thinking": {"start": "<think>"}}, "Setting `thinking.end`={'start': '<think>'}: Field required."),
        ({"thinking": {**TAGS, "seen": True}}, "Setting `thinking.seen`=True: Unexpected keyword argument."),
        (
            {"thinking": {**TAGS, "end": "<think>"}},
            "Setting `thinking`={'start': '<think>', 'end': '<think>'}: thinking",
        ),
        (
            {"thinking": TAGS, "stop": "."},
            "stop=. requires thinking=null. Set that, or stop=null.",
        ),
    ],
)
def test_invalid_ones_are_rejected(values: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError) as error:
        make_settings(values)
    assert str(error.value).startswith(message)


def test_a_hub_model_is_evaluated_at_a_revision() -> None:
    settings = target_settings("owner/model@v2", None, {}, None)
    assert settings.model_paths == {"llm_1": "owner/model@v2"}
