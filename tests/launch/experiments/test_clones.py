"""Every setting that population-based training may change takes effect in a clone."""

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
    **{"kl_target": 6.0, "kl_horizon": 8, "eval_kl_coef": 0.3, "average_period": 2},
}
"""Settings with which the KL coefficient changes, roles are exchanged in every update, and weights are averaged."""
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
    **{"dual_clip": 1.001, "entropy_coef": 0.5},
}
"""The clone's value of each setting that may change."""


def test_all_settings_that_may_change_in_a_clone_are_covered() -> None:
    assert CHANGED.keys() == {name for name, metadata in METADATA.items() if metadata.clone}


def train_clone(checkpoint: Path, **changes: Any) -> tuple[Any, ...]:
    """Restores a clone as Tune does and trains two updates; returns its roles and a checksum of its weights."""
    clone = CoryConfig().cory(**{**TINY, **DONOR, **changes}).build_algo()
    try:
        clone.restore(str(checkpoint))
        for _ in range(2):
            clone.train()
        arrays = [array for policy_id in clone.settings.policy_ids for array in clone.weights(policy_id).values()]
        return clone.mapping.rotation, clone.exchanges, zlib.crc32(b"".join(array.tobytes() for array in arrays))
    finally:
        clone.stop()


@pytest.fixture(scope="module")
def unchanged(
    ray_session: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[float | None, tuple[Any, ...]]]:
    """A donor's checkpoint, and for each kl_target the result of a clone with the donor's settings."""
    folder = tmp_path_factory.mktemp("donor")
    donor = CoryConfig().cory(**{**TINY, **DONOR}).build_algo()
    for _ in range(2):
        donor.train()
    donor.save(str(folder))
    donor.stop()
    return folder, {target: train_clone(folder, kl_target=target) for target in (6.0, None)}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_setting_takes_effect_in_a_clone(
    unchanged: tuple[Path, dict[float | None, tuple[Any, ...]]], name: str
) -> None:
    checkpoint, unchanged_results = unchanged
    target = None if name == "kl_coef" else 6.0  # a controller would continue with the donor's kl_coef
    assert train_clone(checkpoint, **{"kl_target": target, name: CHANGED[name]}) != unchanged_results[target]
