"""Every setting that population-based training may change is in effect in a clone, whatever its donor's was."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest

from policies.cory import CoryConfig
from policies.settings.settings import METADATA
from tests.policies.conftest import TINY, ray_session

__all__ = ["ray_session"]

DONOR: dict[str, Any] = {
    **{"num_updates": 9, "eval_every": 9, "exchange_period": 1, "minibatch_size": 4, "micro_batch_size": 8, "lr": 1e-3},
    **{"kl_control": "adaptive", "kl_horizon": 8, "eval_kl_coef": 0.3, "average_period": 2},
}
"""Whose KL coefficient moves, whose roles are exchanged at once, and whose LLMs are averaged by the end."""
CHANGED: dict[str, Any] = {
    **{
        "exchange_period": 2,
        "reset_on_exchange": True,
        "partner_reward": 0.0,
        "minibatch_size": 8,
        "num_epochs": 1,
        "lr": 1e-4,
    },
    **{"temperature": 0.7, "kl_coef": 0.9, "kl_target": 1.0, "kl_horizon": 80, "reward_scaling": "normalize"},
    **{"gamma": 0.5, "lam": 0.5, "clip_ratio": 0.01, "value_clip": 0.01, "value_coef": 1.0, "grad_clip": 0.01},
    **{"average_period": 3, "average_tau": 0.5, "weight_decay": 0.5, "clip_ratio_high": 0.01},
}
"""A value that each such setting is changed to."""


def test_every_setting_that_may_change_in_a_clone_is_tried() -> None:
    assert CHANGED.keys() == {name for name, known in METADATA.items() if known.clone}


def become(checkpoint: Path, **changes: Any) -> tuple[Any, ...]:
    """Restores a clone as Tune does; returns what two updates make of it: its roles, and a checksum of its weights."""
    clone = CoryConfig().cory(**{**TINY, **DONOR, **changes}).build_algo()
    try:
        clone.restore(str(checkpoint))
        for _ in range(2):
            clone.train()
        arrays = [array for module in clone.settings.policy_ids for array in clone.weights(module).values()]
        return clone.mapping.rotation, clone.exchanges, zlib.crc32(b"".join(array.tobytes() for array in arrays))
    finally:
        clone.stop()


@pytest.fixture(scope="module")
def unchanged(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, tuple[Any, ...]]]:
    """A donor's checkpoint, and what becomes of a clone with its settings, by how the KL coefficient is controlled."""
    folder = tmp_path_factory.mktemp("donor")
    donor = CoryConfig().cory(**{**TINY, **DONOR}).build_algo()
    for _ in range(2):
        donor.train()
    donor.save(str(folder))
    donor.stop()
    return folder, {control: become(folder, kl_control=control) for control in ("adaptive", "fixed")}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGED)
def test_a_setting_that_is_changed_in_a_clone_is_in_effect(
    unchanged: tuple[Path, dict[str, tuple[Any, ...]]], name: str
) -> None:
    checkpoint, usual = unchanged
    control = "fixed" if name == "kl_coef" else "adaptive"  # where a controller would go on with the donor's
    assert become(checkpoint, kl_control=control, **{name: CHANGED[name]}) != usual[control]
