import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from cory_env.functions import parse_spec
from cory_env.tasks.rows import parse_source
from launch.console.configuration import (
    SettingsArguments,
    parse_overrides,
    read_file,
    read_preset,
    resolve_settings,
    settings_to_yaml,
)
from launch.console.errors import CommandError
from launch.experiments.study import load_study
from policies.settings.files import presets
from policies.settings.settings import Settings, SettingsError
from policies.settings.yaml12 import Value, parse_scalar, to_cli
from tests.paper import make_settings, paper_settings
from tests.policies.settings.test_yaml12 import AWKWARD_TEXTS

TEXTS = [
    name for name, field in Settings.model_fields.items() if str in (field.annotation, *get_args(field.annotation))
]
"""Settings with text values."""


@pytest.mark.parametrize("name", presets())
def test_every_preset_resolves_and_has_a_description(name: str) -> None:
    assert resolve_settings(name, [], [])
    assert len(presets()[name].split()) > 3


def test_ppo_and_cory_differ_only_in_the_number_of_agents_and_what_is_tuned_for_time() -> None:
    cory, ppo = (resolve_settings(name, [], []).model_dump() for name in ("imdb-tiny-paper", "imdb-tiny-ppo"))
    assert {key for key in cory if cory[key] != ppo[key]} == {"num_agents", "num_epochs", "lr"}
    assert ppo["num_agents"] == 1


def test_imdb_tiny_is_an_arm_of_the_credit_study() -> None:
    study = load_study("credit")
    preset, arm = (
        resolve_settings("imdb-tiny", [], []).model_dump(),
        study.settings(study.arms["own-rloo-along"], 0).model_dump(),
    )
    differing = {
        "dtype",
        "eval_every",
        "eval_kl_coef",
        "eval_average",
        "test_queries",
        "validation",
        "num_epochs",
        "lr",
        "average_period",
        "average_tau",
    }
    assert {key for key in preset if preset[key] != arm[key]} == differing


def test_the_two_llms_of_the_default_preset_never_have_equal_weights_after_averaging() -> None:
    assert resolve_settings("imdb-tiny", [], []).average_tau < 1


def test_preset_values_that_overrides_make_irrelevant_are_dropped() -> None:
    assert resolve_settings("imdb-tiny", [], []).average_period == 2
    for word in ("num_agents=1", "num_policies=1", "model=[imdb-gpt2-tiny,drafts-llama-tiny]"):
        settings = resolve_settings("imdb-tiny", [], [word])
        assert (settings.average_period, settings.average_tau) == (None, 1)
    assert resolve_settings("drafts-tiny", [], ["credit=sum"]).chain_gamma == 1
    assert resolve_settings("imdb-tiny", [], ["lr=1e-3"]).num_runners == 0
    assert resolve_settings("imdb-tiny", [], ["num_passes=2"]).num_passes == 2
    with pytest.raises(SettingsError, match=r"^num_updates and num_passes both set the length of the run\."):
        resolve_settings("imdb-tiny", [], ["num_passes=2", "num_updates=3"])
    with pytest.raises(SettingsError, match=r"^Setting `chat`='maybe': Input should be 'auto' or a valid boolean"):
        resolve_settings(None, [], ["chat=maybe"])
    for word in ("max_lag=1", "runner_threads=2", "weight_transfer=gloo"):
        assert resolve_settings("imdb-tiny", [], [word]).num_runners == 1
    with pytest.raises(SettingsError, match="max_lag=1 requires num_runners"):
        resolve_settings("imdb-tiny", [], ["max_lag=1", "num_runners=0"])
    with pytest.raises(SettingsError, match="average_period=5 requires two or more LLMs"):
        resolve_settings("imdb-tiny", [], ["num_agents=1", "average_period=5"])


def test_imdb_gpt2_is_the_paper_s_experiment() -> None:
    s = resolve_settings("imdb-gpt2", [], [])
    assert (s.task, s.model, s.num_agents, s.exchange_period) == ("imdb", "openai-community/gpt2-large", 2, 5)
    assert parse_spec(s.reward_spec or "") == (
        "cory_env.rewards.sentiment",
        "positive_logit",
        {"model": "lvwerra/distilbert-imdb"},
    )
    assert parse_source(s.data or "") == ("hub:stanfordnlp/imdb", {"split": "train", "query_column": "text"})
    assert parse_source(s.eval_data or "")[0] == "hub:stanfordnlp/imdb"
    assert (s.min_query_tokens, s.max_query_tokens, s.min_response_tokens, s.max_response_tokens) == (2, 8, 4, 15)
    assert (s.num_updates, s.queries_per_update, s.minibatch_size, s.num_epochs, s.lr, s.kl_coef) == (
        100,
        256,
        256,
        4,
        1.41e-5,
        0.3,
    )
    assert (s.gamma, s.lam, s.clip_range, s.value_clip, s.value_coef) == (1.0, 0.95, (0.2, 0.2), 0.2, 0.1)
    assert (s.kl_target, s.reward_scaling, s.temperature, s.chat) == (None, "none", 1.0, False)


def test_imdb_paper_compat_differs_from_imdb_gpt2_only_where_the_released_code_does() -> None:
    paper, code = (resolve_settings(name, [], []).model_dump() for name in ("imdb-gpt2", "imdb-paper-compat"))
    assert {key: code[key] for key in code if code[key] != paper[key]} == {
        "reward_scaling": "normalize",
        "kl_target": 6.0,
        "kl_estimator": "full",
        "reset_on_exchange": True,
        "max_query_tokens": 7,
        "grad_clip": None,
    }
    assert (code["kl_target"], code["kl_horizon"], code["exchange_period"]) == (6.0, 10000, 5)
    assert resolve_settings("imdb-paper-compat", [], []).report_kl_coef == 0.3  # not changed by a controller


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("true", True),
        ("null", None),
        ("0.5", 0.5),
        ("'3'", "3"),
        ("my_rewards:brevity", "my_rewards:brevity"),
        ("Question: {query} Answer:", "Question: {query} Answer:"),
        ("{query}", "{query}"),
        ("[a", "[a"),
        ("2024-01-01", "2024-01-01"),
        ("2024-13-45", "2024-13-45"),  # looks like a date to YAML
        ("0x_", "0x_"),
        ("0x10", "0x10"),
        ("-0b11", "-0b11"),
        ("0o17", "0o17"),
        ("1_0.5", "1_0.5"),
        ("+.5E-3", 0.0005),
        ("-0012", -12),
    ],
)
def test_a_value_is_a_yaml_scalar_or_else_text(text: str, value: Value) -> None:
    assert parse_scalar(text) == value


def test_numbers_may_have_python_notation(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("lr: 1e-5\nnum_updates: 011\n")
    settings = resolve_settings("imdb-tiny", [tmp_path / "mine.yaml"], ["kl_coef=1e-2", "queries_per_update=0128"])
    assert (settings.lr, settings.num_updates, settings.kl_coef, settings.queries_per_update) == (1e-5, 11, 1e-2, 128)


@pytest.mark.parametrize(
    "word",
    [
        *("lr=0x10", "num_updates=0b11", "num_updates=0o17", "num_updates=1_000", "lr=1_0.5", "lr=-1_0", "lr=1_e5"),
        *("reward_weights=[1, 0x10]", "reward_weights=[1_0, 1]"),
        *("roles=[{name: a, count: 1_0}]", "roles=[{name: a, repeat: 0x1}]"),
    ],
)
@pytest.mark.parametrize("quoted", [False, True])
def test_numbers_that_are_not_decimal_are_rejected(word: str, quoted: bool, tmp_path: Path) -> None:
    key, _, text = word.partition("=")
    text = re.sub(r"(0[xob]\w+|-?\d+_[\w.]+)", r"'\1'", text) if quoted else text
    (tmp_path / "mine.yaml").write_text(f"{key}: {text}\n")
    for files, words in (([], [f"{key}={text}"]), ([tmp_path / "mine.yaml"], [])):
        with pytest.raises(SettingsError, match=rf"Setting `{key}`=.*\d.*: Input should be a valid (number|integer)"):
            resolve_settings("imdb-tiny", files, words)


def test_texts_may_look_like_numbers_that_are_not_decimal(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("stop: 0x10\nsystem_prompt: 1_0.5\n")
    assert read_file(tmp_path / "mine.yaml") == {"stop": "0x10", "system_prompt": "1_0.5"}
    assert parse_overrides(["stop=0x10", "system_prompt=1_0.5"]) == {"stop": "0x10", "system_prompt": "1_0.5"}


@pytest.mark.parametrize("word", ["num_updates=1:30", "lr=yes", "validation=maybe"])
def test_invalid_numbers_and_booleans_are_rejected(word: str, tmp_path: Path) -> None:
    key, _, text = word.partition("=")
    (tmp_path / "mine.yaml").write_text(f"{key}: {text}\n")
    for files, words in (([], [word]), ([tmp_path / "mine.yaml"], [])):
        with pytest.raises(SettingsError, match=f"Setting `{key}`='{text}': Input should be a valid"):
            resolve_settings("imdb-tiny", files, words)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("prompt", '"{query} \\uD83D"'),
        ("reward", '["my_rewards:a?text=\\uD83D"]'),
        ("chat_template_kwargs", '{name: "\\uD83D"}'),
        ("roles", '[{name: solver, prompt: "{query} \\uD83D"}]'),
    ],
)
def test_half_of_a_surrogate_pair_is_rejected_in_any_setting(key: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"{key}: {text}\n")
    with pytest.raises(SettingsError, match=r"mine\.yaml contains half of a surrogate pair"):
        read_file(tmp_path / "mine.yaml")
    value = yaml.safe_load(text)
    with pytest.raises(SettingsError, match=f"Setting `{key}`.*half of a surrogate pair"):
        make_settings({"chat": True, key: value})


def test_yes_and_no_are_booleans_for_boolean_settings_and_text_for_text_settings() -> None:
    settings = resolve_settings(
        "imdb-tiny", [], ["validation=yes", "check_weight_sync=off", "chat=on", "system_prompt=no"]
    )
    assert (settings.validation, settings.check_weight_sync, settings.chat, settings.system_prompt) == (
        True,
        False,
        True,
        "no",
    )


def test_lists_of_models_round_trip_in_files_and_arguments(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model: [a, ./b]\nprompt: '[a]'\n")
    for files, words in (([tmp_path / "mine.yaml"], []), ([], ["model=[a,./b]", "prompt=[a]"])):
        settings = resolve_settings("imdb-tiny", files, words)
        assert (settings.model, settings.prompt) == (["a", "./b"], "[a]")
        (tmp_path / "saved.yaml").write_text(settings_to_yaml(settings))
        assert make_settings(read_file(tmp_path / "saved.yaml")) == settings
    for model in (["a", "b, c]", "'d': é😀"], "[a, b]", "[a", "a"):
        assert parse_overrides([f"model={to_cli(model)}"]) == {"model": model}
    assert to_cli(["a", "./b"]) == "[a, ./b]"


def test_a_very_long_value_is_truncated_in_messages() -> None:
    with pytest.raises(SettingsError) as raised:
        resolve_settings("imdb-tiny", [], ["num_updates=" + "9" * 10_000])
    assert "Setting `num_updates`='999" in str(raised.value) and len(str(raised.value)) < 300


@pytest.mark.parametrize("first", range(len(AWKWARD_TEXTS)))
def test_every_text_round_trips_through_a_settings_file(first: int, tmp_path: Path) -> None:
    texts = dict(
        zip(TEXTS, AWKWARD_TEXTS[first:] + AWKWARD_TEXTS[:first], strict=False)
    )  # over all cases, each setting has each text
    settings = paper_settings().model_copy(update=texts)
    (tmp_path / "saved.yaml").write_text(settings_to_yaml(settings), encoding="utf-8")
    assert read_file(tmp_path / "saved.yaml") == settings.model_dump()


def test_settings_files_of_earlier_versions_are_readable(tmp_path: Path) -> None:
    texts = {
        "prompt": "{query}\n\nA: 'yes' # no",
        "stop": "no",
        "model": "1.5",
        "data": "a.csv?query_column=q",
        "reward": "m:f",
    }
    settings = make_settings(
        {**texts, "lr": 1e-5, "kl_coef": 1e-06, "grad_clip": None, "chat": True, "system_prompt": "a: b"}
    )
    lines = [
        yaml.safe_dump({name: value}, width=1000, allow_unicode=True).strip() + " # what it means"
        for name, value in settings.model_dump().items()
    ]
    (tmp_path / "config.yaml").write_text("# cory train\n" + "\n".join(lines) + "\n")
    assert make_settings(read_file(tmp_path / "config.yaml")) == settings


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lora_rank=8"], "lora_rank=8 requires weights=lora"),
        (["chat_date=2024-07-26"], "chat_date=2024-07-26 requires chat=true"),
        (
            ["lora_target_modules=q_proj", "weights=full"],
            "requires weights=lora. Set that, or lora_target_modules=null.",
        ),
        (["lora_alpha=8", "weights=lora"], None),
        (["lora_rank=16"], None),  # the default, as in a file that lists every setting
    ],
)
def test_adapter_settings_require_adapters(words: list[str], message: str | None) -> None:
    if message is None:
        assert resolve_settings("imdb-tiny", [], words)
    else:
        with pytest.raises(SettingsError, match=message):
            resolve_settings("imdb-tiny", [], words)


def test_overriding_adapters_drops_the_adapter_settings_of_a_preset_or_file(tmp_path: Path) -> None:
    assert resolve_settings("dialogue", [], ["weights=full"]).lora_rank == 16
    mine = tmp_path / "mine.yaml"
    mine.write_text("weights: lora\nlora_rank: 8\n")
    assert resolve_settings("imdb-tiny", [mine], ["weights=full"]).lora_rank == 16
    mine.write_text("lora_rank: 8\n")
    with pytest.raises(SettingsError, match="lora_rank=8 requires weights=lora"):
        resolve_settings("imdb-tiny", [mine], [])


@pytest.mark.parametrize("word", ["num_updates", "=5"])
def test_an_argument_without_key_and_value_is_rejected(word: str) -> None:
    with pytest.raises(CommandError, match=f"`{word}` is not a setting. Write key=value"):
        parse_overrides([word])


def test_a_duplicate_key_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text("lr: 1.0e-5\nlr: 2.0e-5\n")
    with pytest.raises(SettingsError) as raised:
        read_file(file)
    assert str(raised.value).startswith(f'{file} is not valid YAML: found duplicate key "lr"')


def test_a_run_is_named_after_its_preset_or_file() -> None:
    files = [Path("base.yaml"), Path("configs/my task.yaml")]
    for preset, paths, name in (("gsm8k", files, "gsm8k"), (None, files, "my task"), (None, [], "run")):
        assert SettingsArguments(preset, paths, []).name == name


def test_a_preset_builds_on_its_base() -> None:
    assert read_preset("imdb-tiny-ppo")["kl_coef"] == read_preset("imdb-tiny-paper")["kl_coef"]
    assert "base" not in read_preset("imdb-tiny-ppo")


def test_a_long_value_is_separated_from_its_description(tmp_path: Path) -> None:
    (tmp_path / "saved.yaml").write_text(
        settings_to_yaml(paper_settings(model="/a/folder/with/quite/a/long/name/model"))
    )
    assert read_file(tmp_path / "saved.yaml")["model"] == "/a/folder/with/quite/a/long/name/model"


def test_lists_of_rewards_and_weights_work_in_arguments_and_files(tmp_path: Path) -> None:
    words = ["reward=['a:f?x=1', b:g]", "reward_weights=[1, -0.5]"]
    settings = resolve_settings("imdb-tiny", [], words)
    assert (settings.reward, settings.reward_weights) == (["a:f?x=1", "b:g"], [1.0, -0.5])
    assert resolve_settings("imdb-tiny", [], ["reward=[a:f?x=1, b:g]"]).reward == settings.reward
    (tmp_path / "mine.yaml").write_text(settings_to_yaml(settings))
    assert resolve_settings("imdb-tiny", [tmp_path / "mine.yaml"], []) == settings
