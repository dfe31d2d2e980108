"""Names of settings in TRL, verl and OpenRLHF are explained."""

import pytest

from policies.settings.migration.names import explain_foreign_name, foreign_names
from policies.settings.settings import Settings, SettingsError
from tests.paper import make_settings


@pytest.mark.parametrize(
    ("key", "here"),
    [
        ("learning_rate", "lr"),
        ("learning-rate", "lr"),
        ("learing_rate", "lr"),
        ("beta", "kl_coef"),
        ("max_steps", "num_updates"),
        ("max_completion_length", "max_response_tokens"),
        ("max_prompt_length", "max_prompt_tokens"),
        ("num_train_epochs", "num_passes"),
        ("num_iterations", "num_epochs"),
        ("report_to", "tracker=wandb"),
        ("per_device_train_batch_size", "minibatch_size"),
        ("epsilon_high", "clip_ratio_high"),
        ("peft_config", "weights=lora"),
        ("lora_r", "lora_rank"),
        ("bf16", "dtype"),
        ("actor_rollout_ref.actor.optim.lr", "lr"),
        ("+actor_rollout_ref.rollout.n", "num_generations"),
        ("algorithm.adv_estimator", "advantage"),
        ("trainer.total_epochs", "num_passes"),
        ("n_samples_per_prompt", "num_generations"),
        ("init_kl_coef", "kl_coef"),
    ],
)
def test_an_unknown_setting_of_another_library_is_named_as_here(key: str, here: str) -> None:
    with pytest.raises(SettingsError) as error:
        make_settings({key: 1})
    message = str(error.value)
    assert message.startswith(f"Unknown setting `{key}`. ") and f"`{here}`" in message and "](" not in message
    assert "Did you mean" not in message


def test_what_has_no_equivalent_says_so() -> None:
    assert explain_foreign_name("top_p") == (
        "TRL's `top_p` has no equivalent here: responses are sampled from the whole distribution."
    )
    assert explain_foreign_name("digits") == "It is an option of the task: task=arithmetic?digits=VALUE."
    assert explain_foreign_name("samples_every").startswith("It was removed; docs/lab/removed.md says")
    assert "group of settings of verl" in explain_foreign_name("actor_rollout_ref")
    assert "group of settings of verl" in explain_foreign_name("trainer")


def test_typing_errors_in_our_own_names_are_not_taken_for_other_libraries() -> None:
    for name in Settings.model_fields:
        typed = name[:-1] + "x" if len(name) > 6 else name
        hint = explain_foreign_name(typed)
        assert typed in Settings.model_fields or not hint or f"`{name}`" in hint, typed
    with pytest.raises(SettingsError, match="Did you mean `exchange_period`"):
        make_settings({"exchange_perod": 1})
    with pytest.raises(SettingsError, match=r"^Unknown setting `qwertz`\.$"):
        make_settings({"qwertz": 1})


def test_every_name_has_a_sentence_with_settings_or_options_of_commands() -> None:
    assert len(foreign_names()) > 150
    for name, sentence in foreign_names().items():
        assert f"`{name}` is `" in sentence or f"`{name}` has no equivalent here: " in sentence, sentence
