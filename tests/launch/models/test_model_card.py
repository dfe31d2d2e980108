"""What an export says about itself."""

from dataclasses import replace

from cory_env.tokenizer import tokens_holding
from launch.models.export import generation_config
from launch.models.model_card import model_card
from launch.models.trained import open_trained
from launch.run_folder.run import Run


def test_an_export_ends_at_each_token_that_holds_the_stop_text_and_its_card_says_what_the_text_is(
    policies_run: Run,
) -> None:
    plain = open_trained(policies_run.path)
    trained = replace(plain, settings=plain.settings.model_copy(update={"stop": "\n"}))
    tokenizers = plain.settings.make_tokenizers()
    ends = generation_config(plain.settings, tokenizers, "llm_1").eos_token_id
    holding = tokens_holding(tokenizers["llm_1"], "\n")
    assert generation_config(trained.settings, tokenizers, "llm_1").eos_token_id == [*ends, *holding] and holding
    assert "A response is the text before `'\\n'`: cut it there." in model_card(trained, "llm_1", [])
    assert "cut it there" not in model_card(plain, "llm_1", [])
