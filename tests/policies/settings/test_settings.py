"""Tests of flat settings: validation and messages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from datetime import date
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from ray import cloudpickle
from transformers import GenerationConfig, LlamaConfig

from cory_env import cory_v0
from cory_env.chain_settings import MAX_PROMPT_TOKENS, ChainSettings
from cory_env.tasks import TaskSettings
from cory_env.tokenizer import DEFAULT_TOKENIZER, load_tokenizer, same_tokenizer
from policies.cory import CoryConfig
from policies.learning.hyperparameters import Credit, Hyperparameters
from policies.models.model_check import ModelError, check_model, check_tensor_parallel
from policies.models.model_names import BUNDLED_LM
from policies.settings.fields import Fields
from policies.settings.migration.removed import recorded_settings
from policies.settings.resolve import resolve
from policies.settings.settings import Settings, SettingsError, changed_settings
from tests.paper import PAPER, make_settings

TAGS = {"start": "<a>", "end": "</a>"}
MAX_KEYS = 123
"""Maximum number of settings, with the keys of nested ones."""


def test_defaults_are_those_of_the_paper() -> None:
    s = make_settings({})
    assert (s.lr, s.kl_coef, s.queries_per_update, s.minibatch_size, s.num_epochs) == (1.41e-5, 0.3, 256, 256, 4)
    assert (s.gamma, s.lam, s.clip_range, s.value_clip, s.value_coef, s.exchange_period) == (
        1.0,
        0.95,
        (0.2, 0.2),
        0.2,
        0.1,
        5,
    )


def test_a_config_rejects_unknown_settings_immediately() -> None:
    with pytest.raises(SettingsError, match="Did you mean `exchange_period`"):
        CoryConfig().cory(exchange_periods=3)


def test_eval_kl_coef_defaults_to_the_initial_kl_coef() -> None:
    assert make_settings({"kl_coef": 0.2}).report_kl_coef == 0.2
    assert make_settings({"kl_coef": 0.2, "eval_kl_coef": 0.1}).report_kl_coef == 0.1


def test_a_clip_range_that_equals_the_default_is_no_change() -> None:
    assert changed_settings(make_settings({"clip_ratio": 0.2}), make_settings({})) == []
    assert changed_settings(make_settings({}), make_settings({"clip_ratio": 0.1})) == ["clip_ratio"]
    grouped = {"advantage": "rloo", "num_generations": 2}
    gspo = {**grouped, "loss": "gspo"}
    assert changed_settings(make_settings(grouped), make_settings(gspo)) == ["loss"]
    assert make_settings(gspo).clip_range == (3e-4, 4e-4)
    assert changed_settings(make_settings(gspo), make_settings({**gspo, "clip_ratio": 0.2})) == ["clip_ratio"]


def test_a_missing_model_and_an_exceeded_context_length_are_errors() -> None:
    path = make_settings({}).model_paths["llm_1"]
    assert check_model(path, 80) == 4096
    with pytest.raises(ModelError, match="no-such-model"):
        check_model("./no-such-model", 80)
    with pytest.raises(ModelError, match="max_prompt_tokens \\+ max_response_tokens is 10000 tokens"):
        check_model(path, 10_000)


@pytest.mark.parametrize(
    ("heads", "groups", "valid_sizes"),
    [(8, 8, "1, 2, 4, 8"), (8, 2, "1, 2, 4, 8"), (12, 4, "1, 2, 4, 12"), (6, 3, "1, 3, 6")],
)
def test_an_invalid_tensor_parallel_size_is_an_error_that_lists_valid_ones(
    heads: int, groups: int, valid_sizes: str
) -> None:
    config = LlamaConfig(hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=groups)
    for size in valid_sizes.split(", "):
        check_tensor_parallel(config, int(size))
    with pytest.raises(ModelError, match=f"tensor_parallel_size=5 .* {heads} attention heads .*: {valid_sizes}\\."):
        check_tensor_parallel(config, 5)


def test_min_response_tokens_samples_a_length_limit_per_update_from_the_seed() -> None:
    assert {make_settings({"max_response_tokens": 9}).response_limit(update) for update in range(50)} == {9}
    s = make_settings({"min_response_tokens": 4, "max_response_tokens": 15, "seed": 1})
    limits = [s.response_limit(update) for update in range(400)]
    assert set(limits) == set(range(4, 16))
    assert limits == [make_settings(s.model_dump()).response_limit(update) for update in range(400)]
    other = make_settings({"min_response_tokens": 4, "max_response_tokens": 15, "seed": 2})
    assert limits != [other.response_limit(update) for update in range(400)]


def test_llms_may_have_different_models_or_one_model() -> None:
    listed = make_settings({"model": ["a", "b"], "num_agents": 4, "num_policies": 2})
    assert (listed.models, listed.model_names) == ({"llm_1": "a", "llm_2": "b"}, "a, b")
    assert make_settings(json.loads(json.dumps(listed.model_dump()))) == listed
    single = make_settings({"model": "a"})
    assert (single.model, single.models, single.model_names) == ("a", {"llm_1": "a", "llm_2": "a"}, "a")
    repeated = {"model": ["a", "a"], "weights": "lora", "average_period": 1}
    assert make_settings(repeated).models == single.models


def test_models_may_pad_their_embeddings_and_have_additional_end_tokens(small_model: str, tmp_path: Path) -> None:
    s = make_settings({"model": [BUNDLED_LM, small_model]})
    tokenizers = s.make_tokenizers()
    assert tokenizers["llm_1"] is tokenizers["llm_2"]
    assert s.vocab_size(tokenizers, "llm_1") == len(tokenizers["llm_1"]) + 64
    chain = s.chain_settings(tokenizers, "llm_1")
    assert chain["num_embeddings"] == len(tokenizers["llm_1"])  # the other LLM reads these prompts too
    generation_config = GenerationConfig.from_pretrained(small_model)
    generation_config.eos_token_id = [0, 7]
    other = Path(shutil.copytree(small_model, tmp_path / "other"))
    generation_config.save_pretrained(other)
    assert make_settings({"model": [BUNDLED_LM, str(other)]}).stop_token_ids(tokenizers, "llm_1") == [0, 7]


def test_a_run_records_the_date_that_its_chat_template_asks_for(small_model: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(small_model, tmp_path / "dated"))
    template = "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    (folder / "chat_template.jinja").write_text(template)
    dated = make_settings({"model": str(folder), "chat": True})
    recorded = resolve(dated)
    assert recorded.chat_date == date.today().isoformat() and resolve(recorded) is recorded
    config = CoryConfig().cory(
        **{**PAPER, "model": str(folder), "chat": True, "backend": "transformers", "num_runners": 0}
    )
    config.validate()  # as when an algorithm is built
    assert config.settings.chat_date == config.env_config["chat_date"] == recorded.chat_date

    past = dated.model_copy(update={"chat_date": "2019-05-01"})
    chain = past.make_chain(past.make_task(), past.make_tokenizers())
    assert (
        chain.encoders[0]
        .tokenizer.decode(chain.encoders[0].encode_prompts(chain.task.train[:1])[0])
        .startswith("2019user: ")
    )
    assert changed_settings(past, dated) == []  # requested again on another day
    assert changed_settings(past, recorded) == ["chat_date"]
    (folder / "chat_template.jinja").write_text(template.partition("}}")[2])
    assert resolve(dated) == dated  # the template has no date now
    with pytest.raises(SettingsError, match="chat_date"):
        make_settings({"chat": True, "chat_date": "yesterday"})


def remove_token(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["vocab"] = {word: token for word, token in tokenizer["model"]["vocab"].items() if token < 4095}
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]


def swap_tokens(tokenizer: dict[str, Any]) -> None:
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def reverse_merges(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][::-1]


@pytest.mark.parametrize(
    ("change", "chat", "same"),
    [
        (remove_token, False, False),
        (swap_tokens, False, False),
        (reverse_merges, False, False),
        (None, True, False),
        (None, False, True),
    ],
)
def test_models_share_a_tokenizer_unless_a_difference_affects_responses(
    small_model: str, tmp_path: Path, change: Callable[[dict[str, Any]], None] | None, chat: bool, same: bool
) -> None:
    other = Path(shutil.copytree(small_model, tmp_path / "other"))
    (other / "chat_template.jinja").write_text("{{ messages[0].content }}")
    if change is not None:
        content = json.loads((other / "tokenizer.json").read_text())
        change(content)
        (other / "tokenizer.json").write_text(json.dumps(content))
    one, two = make_settings({"model": [small_model, str(other)], "chat": chat}).make_tokenizers().values()
    assert (one is two) == same


def test_tokenizers_with_different_special_tokens_differ() -> None:
    one, other = load_tokenizer(DEFAULT_TOKENIZER), load_tokenizer(DEFAULT_TOKENIZER)
    assert same_tokenizer(one, other)
    other.eos_token = "a"
    assert not same_tokenizer(one, other)


def test_minibatches_divide_all_responses_of_an_update_and_kl_coef_0_allows_any_kl_estimator() -> None:
    s = make_settings(
        {"queries_per_update": 3, "num_generations": 4, "minibatch_size": 6, "advantage": "dr_grpo", "kl_coef": 0.0}
    )
    assert (s.responses, s.critic, s.algorithm) == (12, False, "Dr. GRPO")
    assert make_settings({}).critic and make_settings({}).algorithm == "PPO"


def test_lora_target_modules_are_separated_by_commas() -> None:
    assert make_settings({}).lora is None
    lora = make_settings({"weights": "lora", "lora_rank": 2, "lora_target_modules": "q_proj, v_proj", "seed": 7}).lora
    assert lora is not None and (lora.rank, lora.targets, lora.seed) == (2, ("q_proj", "v_proj"), 7)


def test_the_environment_gets_the_settings_of_its_task() -> None:
    s = make_settings({"task": "arithmetic?digits=1&operations=sums"})
    env = cory_v0.env(**s.env_settings())
    assert env.queries == s.make_task().train
    chain = s.make_chain(s.make_task(), s.make_tokenizers())
    assert env.unwrapped.chain.vocab_size == chain.vocab_size


def test_a_response_ends_with_any_token_that_contains_the_text_of_stop() -> None:
    plain, stopping = make_settings({}), make_settings({"stop": "."})
    tokenizers = plain.make_tokenizers()
    tokenizer = tokenizers["llm_1"]
    added = set(stopping.stop_token_ids(tokenizers, "llm_1")) - set(plain.stop_token_ids(tokenizers, "llm_1"))
    assert set(tokenizer("A. B...", add_special_tokens=False)["input_ids"]) & added
    assert all("." in tokenizer.decode([token]) for token in added)
    chain = stopping.make_chain(stopping.make_task(), tokenizers)
    assert (
        added
        < set(chain.encoders[0].stop_token_ids)
        == set(cory_v0.env(**stopping.env_settings()).unwrapped.chain.encoders[0].stop_token_ids)
    )
    spanning = make_settings({"stop": "no token is as long as this"})
    assert spanning.stop_token_ids(tokenizers, "llm_1") == plain.stop_token_ids(tokenizers, "llm_1")
    assert spanning.env_settings()["stop"] == spanning.stop


def test_rllib_settings_without_effect_are_rejected() -> None:
    with pytest.raises(SettingsError, match="RLlib's `clip_param` has no effect here"):
        CoryConfig().training(clip_param=0.1)


def test_a_reward_may_be_a_weighted_sum_of_functions() -> None:
    several = make_settings({"reward": ["a:f", "b:g?x=1"], "reward_weights": [1, 0.5]})
    assert several.reward_spec == "1.0 * a:f + 0.5 * b:g?x=1" == several.env_settings()["reward"]
    assert make_settings({"reward": "a:f"}).reward_spec == "a:f" and make_settings({}).reward_spec is None
    invalid: dict[str, Any]
    for invalid in ({"reward": ["a:f"], "reward_weights": [1, 2]}, {"reward": []}, {"reward_weights": [1.0]}):
        with pytest.raises(SettingsError, match=r"reward functions, but \d reward_weights"):
            make_settings(invalid)
    with pytest.raises(SettingsError, match="reward_weights"):
        make_settings({"reward": ["a:f"], "reward_weights": [float("nan")]})


def test_recorded_settings_may_contain_removed_ones_without_an_effect() -> None:
    recorded = {**PAPER, "num_siblings": 1, "critic_inputs": "tokens"}
    assert recorded_settings(recorded) == make_settings(PAPER)
    with pytest.raises(SettingsError, match="num_siblings"):
        recorded_settings({**recorded, "num_siblings": 2})


@pytest.mark.parametrize(
    ("recorded", "today"),
    [
        ({"kl_control": "fixed", "kl_target": 6.0, "kl_horizon": 10000}, {}),
        ({"kl_control": "fixed", "kl_target": 3.0, "kl_horizon": 500}, {}),  # neither had an effect
        ({"kl_control": "adaptive", "kl_target": 3.0, "kl_horizon": 500}, {"kl_target": 3.0, "kl_horizon": 500}),
        (
            {"importance_sampling_mode": "none", "importance_sampling_clip_max": 2.0},
            {"importance_sampling_clip_max": None},
        ),
        ({"max_token_kl": 0.5, "runner_resources": "a=1", "prefix_sharing": "off"}, {}),
        ({"max_repetition": 0.6, "stop_on_collapse": True, "samples_every": 1}, {}),
        ({"digits": None, "operations": None}, {}),
        (
            {"task": "arithmetic", "digits": 2, "operations": "sums"},
            {"task": "arithmetic?digits=2&operations=sums"},
        ),
        ({"task": "arithmetic", "digits": None, "operations": "both"}, {"task": "arithmetic?operations=both"}),
        (
            {
                "thinking": {
                    "start": "<a>",
                    "end": "</a>",
                    "in_prompts": False,
                    "in_feedback": False,
                    "in_reward": False,
                }
            },
            {"thinking": {"start": "<a>", "end": "</a>"}},
        ),
        ({"model": "owner/model", "model_revision": "v2"}, {"model": "owner/model@v2"}),
        (
            {"model": ["a/b", "c/d"], "model_revision": ["v2", None]},
            {"model": ["a/b@v2", "c/d"]},
        ),
        ({"model": "a/b", "model_revision": ["v2", "v2"]}, {"model": "a/b@v2"}),
        ({"model_revision": None, "cispo_clip_max": 5.0, "drop_zero_std_groups": False}, {}),
        (
            {"loss": "cispo", "cispo_clip_max": 3.0, "cispo_clip_min": 0.25},
            {"loss": "cispo", "clip_ratio": 0.75, "clip_ratio_high": 2.0},
        ),
    ],
)
def test_recorded_settings_mean_what_they_meant(recorded: dict[str, Any], today: dict[str, Any]) -> None:
    assert recorded_settings({**PAPER, "num_agents": 2, **recorded}) == make_settings({"num_agents": 2, **today})


def test_whole_numbers_and_tuples_are_accepted_in_any_form_and_texts_and_booleans_are_not() -> None:
    settings = make_settings({"num_updates": 1e3, "seed": np.int64(3), "lr": np.float32(0.5), "reward_weights": None})
    assert (settings.num_updates, settings.seed, settings.lr) == (1000, 3, 0.5)
    assert type(settings.num_updates) is int and type(settings.lr) is float
    assert make_settings({"model": ("a/b", "c/d")}).model == ["a/b", "c/d"]
    for count in ("1_0", True, 2.0):
        with pytest.raises(SettingsError, match="count"):
            make_settings({"roles": ({"name": "drafter", "count": count},)})
    for value in (2.5, "16", True):
        with pytest.raises(SettingsError, match="num_updates"):
            make_settings({"num_updates": value})


@pytest.mark.parametrize(("name", "value"), [("drop_zero_std_groups", True), ("num_siblings", 2)])
def test_recorded_settings_that_had_an_effect_are_unknown(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=f"Unknown setting `{name}`"):
        recorded_settings({**PAPER, name: value})


def test_a_configuration_carries_its_settings_to_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CoryConfig().cory(**PAPER)
    config.validate()
    settings = config.settings
    assert config.settings is settings and "_validated" not in config.to_dict()
    monkeypatch.setattr("policies.config.make_settings", pytest.fail)
    assert cloudpickle.loads(cloudpickle.dumps(config)).settings == settings  # not validated again
    monkeypatch.undo()
    config.cory_settings["lr"] = 0.5
    assert config.settings.lr == 0.5 and settings.lr != 0.5


def setting_keys(kind: Any) -> list[str]:
    """Returns the keys of a mapping of settings; of a nested mapping, its keys instead of its own."""
    keys = []
    for name, annotation in get_type_hints(kind).items():
        parts = [annotation, *get_args(annotation), *(part for arg in get_args(annotation) for part in get_args(arg))]
        nested = [key for part in parts if is_dataclass(part) for key in setting_keys(part)]
        keys += [f"{name}.{key}" for key in nested] or ([] if name == "model_config" else [name])
    return [key for key in keys if not key.startswith("__")]


def test_there_are_few_settings() -> None:
    keys = setting_keys(Fields)
    print(f"{len(Settings.model_fields)} settings with {len(keys)} keys, those of nested ones included.")
    assert "thinking.start" in keys and "roles.policy" in keys
    assert len(keys) <= MAX_KEYS


def test_the_environment_and_the_task_have_the_defaults_of_the_settings() -> None:
    """`max_prompt_tokens` is chosen from the data, and the environment's default is its largest value."""
    defaults = {name: field.default for name, field in Settings.model_fields.items()}
    parameters = signature(cory_v0.raw_env.__init__).parameters
    own = {"task": "imdb", "num_agents": None, "max_prompt_tokens": MAX_PROMPT_TOKENS, "validation": 0}
    for kind in (ChainSettings, TaskSettings):
        for field in fields(kind):
            if field.name in defaults and field.name not in own:
                assert field.default == defaults[field.name], field.name
    for name in parameters.keys() & defaults.keys() - own.keys():
        assert parameters[name].default == defaults[name], name
    for view in (Hyperparameters, Credit):
        assert all(parameter.default is Parameter.empty for parameter in signature(view).parameters.values())
