"""Losses, importance sampling weights and advantages against numbers computed by verl's and TRL's own functions.

The numbers are not part of this repository; without them these tests are skipped. The losses are the learner's own: the
policy's log-probabilities are given, and everything else is `PolicyLearner.loss`.
"""

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from policies.learning import advantages, losses, token_ppo
from policies.learning.policy_learner import PolicyLearner
from policies.learning.rows import TrainRows
from tests.paper import paper_hyperparameters
from tests.policies.learning.batches import make_batch

GOLDEN = Path(__file__).parents[4] / "shared" / "golden" / "losses.json"
pytestmark = pytest.mark.skipif(not GOLDEN.exists(), reason="the golden numbers are not beside this checkout")

TOLERANCE = 1e-7
GSPO = paper_hyperparameters(loss="gspo", advantage="rloo")
IMPORTANCE = {
    "token_truncate_cap_2.0": ("token_truncate", None, 2.0),
    "token_truncate_cap_1.3": ("token_truncate", None, 1.3),
    "sequence_truncate_cap_2.0": ("sequence_truncate", None, 2.0),
    "sequence_truncate_cap_1.3": ("sequence_truncate", None, 1.3),
    "token_mask_low_0.5_cap_2.0": ("token_mask", 0.5, 2.0),
    "token_mask_low_1e-30_cap_1.3": ("token_mask", None, 1.3),
    "sequence_mask_low_0.5_cap_2.0": ("sequence_mask", 0.5, 2.0),
    "sequence_mask_low_1e-30_cap_1.3": ("sequence_mask", None, 1.3),
}
"""Mode, lower and upper bound of each case."""


@cache
def golden() -> dict[str, Any]:
    numbers: dict[str, Any] = json.loads(GOLDEN.read_text())
    return numbers


def tensor(*path: str) -> Tensor:
    values: Any = golden()
    for key in path:
        values = values[key]
    return torch.tensor(values, dtype=torch.float64)


def column(name: str) -> Tensor:
    return tensor("inputs", name)


def assert_close(ours: Tensor | float, theirs: Tensor | float) -> None:
    ours, theirs = (torch.as_tensor(x, dtype=torch.float64) for x in (ours, theirs))
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


def make_rows(per: str) -> TrainRows:
    """The inputs as the learner's rows, with advantages per `row` or per `token`."""
    mask = column("mask")
    token_advantages = column("advantages_row").unsqueeze(1) if per == "row" else column("advantages_token")
    return make_batch(
        mask=mask,
        logprobs=column("logp_old"),
        sampler_logprobs=column("logp_sampler"),
        reference_logprobs=column("logp_ref"),
        advantages=token_advantages * mask,
    )


def learner_loss(
    rows: TrainRows, new: str = "logp_new", kl_coef: float = 0.0, **others: Any
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """The learner's mean loss of a mini-batch, its gradient by the log-probabilities, and the means of its terms."""
    h = paper_hyperparameters(**{"advantage": "rloo", **others})
    logprobs = column(new).requires_grad_()
    learner = cast(PolicyLearner, SimpleNamespace(hyperparameters=h, model=lambda *_, **__: (logprobs, None, None)))
    total, sums = PolicyLearner.loss(learner, rows, kl_coef)
    weight = losses.token_weights(rows.mask, h).sum()
    (total / weight).backward()
    assert logprobs.grad is not None
    return (total / weight).detach(), logprobs.grad, {name: (value / weight).item() for name, value in sums.items()}


def assert_agrees(ours: tuple[Tensor, Tensor, dict[str, float]], *path: str) -> dict[str, float]:
    """Compares loss, gradient and policy loss; returns the means of the terms."""
    loss, gradient, means = ours
    assert_close(loss, tensor(*path, "loss"))
    assert_close(gradient, tensor(*path, "grad_logp_new"))
    return means


@pytest.mark.parametrize("per", ["row", "token"])
@pytest.mark.parametrize(("high", "name"), [(None, "clip_0.2_0.2"), (0.28, "clip_0.2_0.28")])
def test_ppo_agrees(per: str, high: float | None, name: str) -> None:
    path = ("ppo", f"{name}_token-mean_{per}")
    means = assert_agrees(learner_loss(make_rows(per), clip_ratio=0.2, clip_ratio_high=high), *path)
    assert_close(means["clip_fraction"], tensor(*path, "clip_fraction"))
    # With the mean per response, as in GSPO.
    rows, logprobs = make_rows(per), column("logp_new").requires_grad_()
    tokens, _ = losses.ppo(logprobs, rows.logprobs, rows.advantages, 0.2, high)
    weights = losses.token_weights(rows.mask, GSPO)
    loss = (tokens * weights).sum() / weights.sum()
    loss.backward()
    assert logprobs.grad is not None
    assert_close(loss.detach(), tensor("ppo", f"{name}_seq-mean-token-mean_{per}", "loss"))
    assert_close(logprobs.grad, tensor("ppo", f"{name}_seq-mean-token-mean_{per}", "grad_logp_new"))


@pytest.mark.parametrize("per", ["row", "token"])
@pytest.mark.parametrize("bound", [1.5, 3.0])
def test_dual_clip_agrees(per: str, bound: float) -> None:
    path = ("dual_clip", f"c_{bound}_{per}")
    means = assert_agrees(learner_loss(make_rows(per), dual_clip=bound), *path)
    assert_close(means["clip_fraction"], tensor(*path, "clip_fraction"))
    assert_close(means["dual_clip_fraction"], tensor(*path, "dual_clip_fraction"))


@pytest.mark.parametrize(
    ("name", "new", "clip"),
    [
        ("small_3e-4_4e-4", "logp_new_small", {}),  # the default
        ("large_0.2_0.2", "logp_new", {"clip_ratio": 0.2}),
    ],
)
def test_gspo_agrees(name: str, new: str, clip: dict[str, Any]) -> None:
    rows = make_rows("row")
    means = assert_agrees(learner_loss(rows, new, loss="gspo", **clip), "gspo", name)
    assert_close(means["loss"], tensor("gspo", name, "trl_loss"))
    assert_close(means["clip_fraction"], tensor("gspo", name, "trl_share_of_sequences_clipped"))
    h = paper_hyperparameters(loss="gspo", **clip)
    clipped = losses.policy_loss(column(new), rows, h)[1]["clip_fraction"] * rows.mask
    assert_close(clipped.sum() / rows.mask.sum(), tensor("gspo", name, "clip_fraction"))


@pytest.mark.parametrize("per", ["row", "token"])
@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("cap_1.28", {"clip_ratio": 1.0, "clip_ratio_high": 0.28}),
        ("cap_3", {"clip_ratio": 1.0, "clip_ratio_high": 2.0}),
        ("verl_0.2_0.28", {"clip_ratio": 0.2, "clip_ratio_high": 0.28}),
    ],
)
def test_cispo_agrees(per: str, name: str, bounds: dict[str, Any]) -> None:
    path = ("cispo", f"{name}_{per}")
    means = assert_agrees(learner_loss(make_rows(per), loss="cispo", **bounds), *path)
    assert_close(means["clip_fraction"], tensor(*path, "clip_fraction"))


@pytest.mark.parametrize("name", IMPORTANCE)
def test_importance_sampling_weights_and_their_losses_agree(name: str) -> None:
    mode, low, high = IMPORTANCE[name]
    rows = make_rows("row")
    sampling: dict[str, Any] = {
        "importance_sampling_mode": mode,
        "importance_sampling_clip_max": high,
        "importance_sampling_clip_min": low,
    }
    weights, _ = losses.importance_sampling_weights(rows, paper_hyperparameters(**sampling))
    assert_close(weights * rows.mask, tensor("importance", name, "weights"))
    means = assert_agrees(learner_loss(rows, clip_ratio=0.2, **sampling), "importance", name, "loss")
    if "mask" in name:
        out_of_bounds = means["importance_sampling_frac_high"] + means.get("importance_sampling_frac_low", 0.0)
        assert_close(out_of_bounds, tensor("importance", name, "out_of_bounds"))


def test_the_loss_with_a_kl_agrees() -> None:
    ours = learner_loss(make_rows("row"), kl_coef=0.05, advantage="grpo", kl_estimator="k3", clip_ratio=0.2)
    assert_agrees(ours, "loss_with_kl_k3_beta_0.05")


def test_importance_sampling_weights_do_not_touch_the_kl() -> None:
    """The gradient of the KL alone is the same with and without weights."""
    sampling: dict[str, Any] = {"importance_sampling_mode": "token_truncate", "importance_sampling_clip_max": 2.0}
    plain, weighted = (
        {
            kl_coef: learner_loss(make_rows("row"), kl_coef=kl_coef, advantage="grpo", **others)[1]
            for kl_coef in (0.0, 0.05)
        }
        for others in ({}, sampling)
    )
    assert_close(weighted[0.05] - weighted[0.0], plain[0.05] - plain[0.0])
    assert (weighted[0.0] - plain[0.0]).abs().max() > 0.01


def test_k1_and_the_bounded_k3_agree() -> None:
    logprobs, reference = tensor("k3", "logp"), tensor("k3", "logp_ref")
    assert_close(token_ppo.sampled_kl(logprobs, reference, "k1"), tensor("k3", "k1"))
    assert_close(token_ppo.sampled_kl(logprobs, reference, "k3"), tensor("k3", "verl_clamped"))


def test_advantages_of_groups_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = tensor("groups", "scores")
    groups = torch.tensor([ord(name) for name in golden()["groups"]["index"]])
    assert_close(advantages.rloo(scores, groups), tensor("groups", "rloo"))
    assert_close(advantages.dr_grpo(scores, groups), tensor("groups", "no_std"))
    monkeypatch.setattr(advantages, "STD_EPSILON", 1e-6)  # verl's
    assert_close(advantages.grpo(scores, groups), tensor("groups", "grpo"))
    assert advantages.has_nonzero_std(scores, groups).tolist() == [True] * 3 + [False] * 3 + [True] * 2
