"""The model card and the generation config of an export."""

from dataclasses import replace

import pytest

from cory_env.chain_settings import Thinking
from cory_env.tokenizer import token_ids_containing
from launch.models.export import generation_config, model_card
from launch.models.trained import open_trained
from launch.run_folder.run import Run


def test_the_card_names_the_tags_of_thoughts_and_the_revision_of_the_base(
    policies_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the base has no card
    plain = open_trained(policies_run.path)
    changes = {"thinking": Thinking("<think>", "</think>"), "model": "owner/absent@v2"}
    card = model_card(replace(plain, settings=plain.settings.model_copy(update=changes)), "llm_1", [], adapter=False)
    assert "`owner/absent` (revision `v2`), trained by" in card and "base_model: owner/absent" in card
    assert "It thinks between `<think>` and `</think>`; its answer is the text after that." in card
    assert "thinks between" not in model_card(plain, "llm_1", [])


def test_the_card_names_the_factors_of_longrope(policies_run: Run) -> None:
    trained = open_trained(policies_run.path)
    lora = replace(trained, settings=trained.settings.model_copy(update={"weights": "lora", "lora_rank": 4}))
    assert "vLLM does so if `--max-model-len` is above" in model_card(lora, "llm_1", [], adapter=True, long_rope=True)
    assert "has longrope's long factors for rows of all lengths" in model_card(trained, "llm_1", [], long_rope=True)
    assert "longrope" not in model_card(trained, "llm_1", [])


def test_every_token_with_the_stop_text_is_an_end_token_and_the_card_names_the_stop_text(policies_run: Run) -> None:
    plain = open_trained(policies_run.path)
    trained = replace(plain, settings=plain.settings.model_copy(update={"stop": "\n"}))
    eos_ids = generation_config(plain, "llm_1").eos_token_id
    stop_ids = token_ids_containing(plain.tokenizers["llm_1"], "\n")
    assert generation_config(trained, "llm_1").eos_token_id == [*eos_ids, *stop_ids] and stop_ids
    assert "A response ends before `'\\n'`: truncate it there." in model_card(trained, "llm_1", [])
    assert "truncate it there" not in model_card(plain, "llm_1", [])
