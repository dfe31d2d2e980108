"""The settings of committed presets and arms, on which published results rest, do not follow changed defaults."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.feedback.design import (
    PRESET,
    SHARED,
    Choice,
    chain_pilots,
    main_arms,
    other_arms,
    single_pilots,
)
from launch.experiments.study import bundled_studies, load_study
from policies.settings.files import presets, read_preset
from policies.settings.overrides import apply_overrides
from policies.settings.resolve import is_resolved
from policies.settings.settings import Settings, make_settings

RECORD = Path(__file__).with_name("committed_settings.json")
"""`common`: values that most of them have; `presets`, `studies` and `feedback`: where each differs from it."""
MACHINE = {"backend", "gpus_per_runner", "gpus_per_learner"}
"""Settings whose defaults depend on the machine."""
CHANGED = {"num_passes", "checkpoint_minutes", "env", "max_turns", "env_processes", "old_logprobs", "torch_compile"}
"""Settings that the record does not have, because they are newer; all presets and arms have their defaults."""
NEW = {"paper", "demo/chain", "demo/single", "signals-tiny"}
"""Presets and arms that are newer than the record."""
EXCEPTIONS: dict[str, dict[str, Any]] = {"imdb-tiny": {"average_period": 2, "average_tau": 0.5}}
"""Preset → values that were changed on purpose."""


@cache
def committed_settings() -> dict[str, dict[str, Settings]]:
    """The resolved settings of all presets, and of all arms of bundled studies and of the study of feedback."""
    arms: dict[str, Settings] = {}
    for name in bundled_studies():
        study = load_study(name)
        arms |= {f"{name}/{arm}": study.settings(study.arms[arm], 0) for arm in study.arms}
    temperatures = {"one_answer": 1.0, "best_of": 1.0, "chain": 1.0}
    choice = Choice("rloo", 1e-4, "own", 1e-4, temperatures)
    pilots = single_pilots() + [arm for estimator in ("rloo", "ppo") for arm in chain_pilots(estimator)]
    feedback = {
        arm.name: make_settings(apply_overrides(read_preset(PRESET), {**SHARED, **(arm.settings or {})}))
        for arm in [*pilots, *main_arms(choice), *other_arms(choice)]
    }
    return {
        "presets": {name: make_settings(read_preset(name)) for name in presets()},
        "studies": arms,
        "feedback": feedback,
    }


@pytest.mark.parametrize("kind", ["presets", "studies", "feedback"])
def test_committed_presets_and_arms_have_the_settings_of_their_published_results(kind: str) -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    current = committed_settings()[kind]
    new = {name: field.default for name, field in Settings.model_fields.items() if name in CHANGED}
    assert current.keys() - NEW == record[kind].keys()
    for name, differences in record[kind].items():
        expected = {**record["common"], **new, **differences, **EXCEPTIONS.get(name, {})}
        values = json.loads(json.dumps(current[name].model_dump()))
        assert {key: value for key, value in values.items() if key not in MACHINE} == expected, name


def test_presets_of_published_results_leave_nothing_open() -> None:
    for name, settings in committed_settings()["presets"].items():
        assert is_resolved(settings), name
