"""Training with each policy loss: of chains, of roles, and of adapters."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.policies.conftest import MakeCory
from tests.policies.test_roles import TEAM, weights_of

SAMPLING = {"importance_sampling_mode": "sequence_mask", "importance_sampling_clip_min": 0.5}
GROUPS: dict[str, Any] = {"advantage": "rloo", "num_generations": 2, "queries_per_update": 4}
CASES: list[tuple[dict[str, Any], set[str]]] = [
    ({**GROUPS, "loss": "gspo", "weights": "lora", "minibatch_size": 4, **SAMPLING}, {"importance_sampling_frac_low"}),
    ({**TEAM, "loss": "cispo", "entropy_coef": 0.01}, set()),
    ({"loss": "ppo", "dual_clip": 3.0}, {"dual_clip_fraction", "value_loss"}),
]


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        pytest.param(*CASES[0], id="gspo, adapters"),
        pytest.param(*CASES[1], id="cispo, roles", marks=pytest.mark.slow),
        pytest.param(*CASES[2], id="ppo, dual clip", marks=pytest.mark.slow),
    ],
)
def test_every_llm_trains_with_every_loss_and_reports_its_terms(
    make_cory: MakeCory, settings: dict[str, Any], names: set[str]
) -> None:
    algorithm = make_cory(**{"lr": 1e-3, **settings})
    before = weights_of(algorithm)
    report = algorithm.train()["cory"]
    after = weights_of(algorithm)
    for policy_id, metrics in report["policy"].items():
        assert {"policy_loss", "clip_fraction", "grad_norm", "importance_sampling_frac_high", *names} <= metrics.keys()
        assert all(math.isfinite(metrics[name]) for name in (*names, "policy_loss", "grad_norm"))
        assert any((after[name] != array).any() for name, array in before.items() if name.startswith(policy_id))
        if settings["loss"] == "gspo":
            assert metrics["clip_fraction"] > 0.0  # a range of 3e-4 is narrow
