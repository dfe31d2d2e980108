"""Settings given over other settings: what they make irrelevant, and what has no effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policies.settings.error import SettingsError
from policies.settings.settings import Settings

RUNNER_SETTINGS = (
    "gpus_per_runner",
    "max_lag",
    "runner_resources",
    "runner_threads",
    "tensor_parallel",
    "weight_transfer",
)
"""Settings of processes that only generate."""


def apply_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Applies overrides to settings that others chose, such as a preset's, and drops those that they make irrelevant.

    These are averaging if one LLM is left or LLMs start from different models, what describes the other `credit`, and
    `num_runners=0` if a setting of runners is overridden. So `num_agents=1` alone makes a single agent of a preset
    whose LLMs are averaged. Overrides always stay, and `make_settings` rejects those without effect.

    Args:
        values: setting name → value; neither these nor the overrides need be complete or valid.
        overrides: the same.
    """
    result = {**values, **overrides}
    models = result.get("model")
    llms = result.get("num_policies") or result.get("num_agents")
    descriptions = {"sum": ["partner_reward"], "chain": ["chain_gamma", "chain_lam"]}
    descriptions.pop(result.get("credit", "sum"), None)
    irrelevant = [name for names in descriptions.values() for name in names]
    if llms == 1 or (isinstance(models, list) and any(model != models[0] for model in models)):
        irrelevant += ["average_period", "average_share", "evaluate_average"]
        irrelevant += ["select_by"] if result.get("select_by") == "mean" else []
    if result.get("num_runners") == 0 and any(overrides.get(name) for name in RUNNER_SETTINGS):
        irrelevant += ["num_runners"]
    return {name: value for name, value in result.items() if name in overrides or name not in irrelevant}


def reject_unused_settings(given: Mapping[str, Any], settings: Settings) -> None:
    """Rejects a setting of adapters, or of chat templates, that was given explicitly if there are none.

    Defaults pass, because files that list every setting hold them. So does what was given together with `weights=lora`
    or `chat=true`, if a source of higher priority then took that back.

    Args:
        given: the settings of one file, or of the command line.
        settings: the resulting settings.

    Raises:
        SettingsError: names the setting and what would make it count.
    """
    if given.get("chat_date") is not None and not (settings.chat or given.get("chat")):
        raise SettingsError("chat_date is set, but chat is off, so no template gets it. Set chat=true.")
    if settings.weights == "lora" or given.get("weights") == "lora":
        return
    for name in ("lora_rank", "lora_alpha", "lora_targets"):
        value = getattr(settings, name)
        if name in given and value != Settings.model_fields[name].default:
            raise SettingsError(
                f"{name}={value} has no effect: it describes adapters, and weights={settings.weights} has none. Set "
                f"weights=lora, or leave {name} out."
            )
