"""In which settings two arms differ, and which of these differences alone could explain a contrast.

Two arms with another learning rate or number of optimizer steps differ in how far they were trained, whatever else they
compare. Such differences are marked, unless the contrast allows them.
"""

from collections.abc import Collection, Iterable
from typing import Literal

from launch.experiments.results import MACHINE_SETTINGS
from policies.settings.settings import Settings, changed_settings
from policies.settings.yaml12 import Value, to_cli

Confounder = Literal["lr", "lr_schedule", "warmup_updates", "num_epochs", "optimizer_steps"]
"""Differences that are marked: settings, and the computed number of optimizer steps of each LLM."""
MARKED: tuple[Confounder, ...] = ("lr", "lr_schedule", "warmup_updates", "num_epochs", "optimizer_steps")
MARK = "⚠"
_LONGEST_VALUE = 40


def optimizer_steps(settings: Settings) -> int:
    """Returns the number of optimizer steps that each LLM takes in a run: updates x epochs x mini-batches."""
    return settings.num_updates * settings.num_epochs * settings.hyperparameters.steps


def arm_differences(arm: Settings, against: Settings, allow: Collection[Confounder] = ()) -> list[str]:
    """Returns the differences between the settings of two arms as texts, marked ones first."""
    names = [name for name in changed_settings(arm, against) if name not in MACHINE_SETTINGS and name != "seed"]
    dumps = arm.comparable_dump(), against.comparable_dump()
    values = {name: (dumps[0][name], dumps[1][name]) for name in sorted(names)}
    steps = optimizer_steps(arm), optimizer_steps(against)
    if steps[0] != steps[1]:
        values["optimizer_steps"] = steps
    texts = {name: f"{_format(one)} vs. {_format(other)}" for name, (one, other) in values.items()}
    marked = [name for name in MARKED if name in texts and name not in allow]
    return [f"{MARK} {_label(name)} differs: {texts[name]}" for name in marked] + [
        f"{_label(name)} {text}" + " (allowed)" * (name in allow) for name, text in texts.items() if name not in marked
    ]


def format_differences(pairs: Iterable[tuple[str, Collection[str]]]) -> str:
    """Returns a paragraph of the differences of contrasts, one line per contrast."""
    lines = [f"  {names}: {'; '.join(differences) or 'no setting differs'}" for names, differences in pairs]
    return "\n".join([f"Settings that differ ({MARK} could explain a difference by itself):", *dict.fromkeys(lines)])


def _label(name: str) -> str:
    return name.replace("optimizer_steps", "number of optimizer steps per LLM")


def _format(value: Value) -> str:
    text = to_cli(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"
