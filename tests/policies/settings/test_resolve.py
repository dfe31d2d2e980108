"""Values that are filled in when a run starts."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from cory_env.tasks import make_task
from launch.training.description import describe_run, describe_settings, small_splits_warning
from policies.cory import CoryConfig
from policies.settings.resolve import MAX_PROMPT_TOKENS, is_resolved, resolve
from policies.settings.settings import changed_settings, make_settings

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
REWARD = "tests.policies.sample_rewards:letters"
ROWS = 50


@pytest.fixture
def values(tmp_path: Path, small_model: str) -> dict[str, Any]:
    """Settings of a file of one's own: data, a reward and a model."""
    lines = [json.dumps({"query": f"The film number {number} was"}) for number in range(ROWS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    here = {"backend": "transformers", "num_runners": 0, "max_response_tokens": 16}
    return {"data": str(tmp_path / "rows.jsonl"), "reward": REWARD, "model": small_model, **here}


def with_template(model: str, folder: Path) -> str:
    copy = Path(shutil.copytree(model, folder))
    (copy / "chat_template.jinja").write_text(TEMPLATE)
    return str(copy)


def test_a_file_with_three_lines_is_complete(values: dict[str, Any]) -> None:
    settings = resolve(make_settings(values))
    assert is_resolved(settings) and resolve(settings) is settings
    assert (settings.task, settings.chat, settings.lr) == ("custom", False, 1e-5)
    assert settings.micro_batch_tokens in (512, 1024, 2048, 4096, 8192, 16384)
    assert (settings.responses, settings.responses_per_step) == (128, 128)
    config = CoryConfig().cory(**values)
    config.validate()
    assert config.settings == settings
    assert config.env_config["max_prompt_tokens"] == settings.max_prompt_tokens


def test_prompts_are_chat_if_all_tokenizers_have_a_template(values: dict[str, Any], tmp_path: Path) -> None:
    chat_model = with_template(values["model"], tmp_path / "chat")
    assert resolve(make_settings({**values, "model": chat_model})).chat is True
    assert resolve(make_settings({**values, "model": chat_model, "chat": False})).chat is False
    mixed = {**values, "model": [values["model"], chat_model], "weights": "full"}
    assert resolve(make_settings(mixed)).chat is False
    with pytest.raises(ValueError, match="system_prompt=Be brief requires chat=true"):
        resolve(make_settings({**values, "system_prompt": "Be brief"}))


def test_the_learning_rate_is_that_of_the_kind_of_weights(values: dict[str, Any]) -> None:
    assert resolve(make_settings({**values, "weights": "full"})).lr == 1e-6
    assert resolve(make_settings({**values, "lr": 3e-4})).lr == 3e-4
    assert make_settings(values).hyperparameters.lr == 1e-5


def test_prompts_are_as_long_as_the_data_need_up_to_a_limit(values: dict[str, Any], tmp_path: Path) -> None:
    settings = make_settings(values)
    limit = resolve(settings).max_prompt_tokens
    assert limit is not None
    chain = resolve(settings).make_chain(settings.make_task(), settings.make_tokenizers())
    queries = chain.task.all_queries()
    longest = max(map(len, chain.encoders[0].encode_prompts([*queries])))
    assert longest + 16 < limit < longest + 40  # the observer's prompt has a full-length response too
    assert resolve(make_settings({**values, "max_response_tokens": 32})).max_prompt_tokens == limit + 16
    assert resolve(make_settings({**values, "num_agents": 1})).max_prompt_tokens == longest
    assert resolve(make_settings({**values, "max_prompt_tokens": 77})).max_prompt_tokens == 77
    long = {"max_response_tokens": 100, "num_agents": 3}  # the model has 128 positions
    assert resolve(make_settings({**values, **long})).max_prompt_tokens == 28
    assert MAX_PROMPT_TOKENS == 4096


@pytest.mark.parametrize("passes", [0.1, 1, 2.5])
def test_the_length_in_passes_becomes_a_number_of_updates(values: dict[str, Any], passes: float) -> None:
    settings = resolve(make_settings({**values, "num_passes": passes, "queries_per_update": 8}))
    num_train = len(settings.make_task().train)
    assert (settings.num_updates, settings.num_passes) == (math.ceil(passes * num_train / 8), None)


def test_values_that_a_run_filled_in_are_no_differences(values: dict[str, Any]) -> None:
    requested = make_settings(values)
    assert changed_settings(resolve(requested), requested) == []
    assert changed_settings(resolve(requested), make_settings({**values, "chat": True, "lr": 1e-3})) == ["chat", "lr"]


def test_the_deciding_settings_are_listed_with_the_number_of_queries(values: dict[str, Any]) -> None:
    requested = make_settings(values)
    settings = resolve(requested)
    task = make_task(settings.task_settings)

    text = describe_settings(settings, requested.model_fields_set, task)
    chosen, _, rest = text.partition("Defaults:")
    defaults, _, queries = rest.partition("Queries:")
    assert chosen.startswith("Set:") and "max_response_tokens=16" in chosen and "lr=" not in chosen
    for word in ("chat=false", "lr=1e-05", "weights=lora", "kl_coef=0.01", "partner_reward=0.0", "minibatch_size=null"):
        assert word in defaults.split(), word
    assert f"max_prompt_tokens={settings.max_prompt_tokens}" in defaults.split()
    assert queries.split() == ["34", "train,", "8", "validation,", "8", "test"]
    warning = small_splits_warning(settings, task)
    assert warning is not None and warning.startswith("Only 8 validation and 8 test queries, fewer than 20 each")


def test_a_run_is_described_with_its_agents_policies_and_what_to_compare_it_with(values: dict[str, Any]) -> None:
    text = describe_run(make_settings({**values, "num_updates": 1}), "->")
    assert "CORY by RLOO: 2 agents (pioneer -> observer), 2 LLMs with their own adapters on one base" in text
    assert "1 update of " in text and "; roles are exchanged every 5." in text
    assert "num_agents=1 trains a single agent, num_policies=1 one LLM in all roles." in text
    alone = describe_run(make_settings({**values, "num_agents": 1}), "->")
    assert alone.startswith("RLOO: one agent learns") and "compare" not in alone and "exchanged" not in alone
