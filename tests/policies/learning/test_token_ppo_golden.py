"""The formulas against numbers computed by the paper's official code.

The numbers are not part of this repository; without them these tests are skipped. Their prediction axis has prompt,
response and padding, ours only responses, so the rows of `token_rewards` are shifted to the start of the response.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from policies.learning import losses, token_ppo
from policies.learning.estimation import RewardMoments
from policies.learning.forward import logits as learner_logits

GOLDEN = Path(__file__).parents[4] / "shared" / "golden" / "token_ppo.json"
pytestmark = pytest.mark.skipif(not GOLDEN.exists(), reason="the golden numbers are not beside this checkout")

KL_COEF = 0.4
DTYPES = {"f64": torch.float64, "f32": torch.float32}
MODES = [("f64", "kl"), ("f64", "full"), ("f32", "kl"), ("f32", "full")]
GAES = [
    *[("f64", mode, gamma, lam) for mode in ("kl", "full") for gamma, lam in ((1.0, 0.95), (0.9, 0.8))],
    *[("f32", mode, 1.0, 0.95) for mode in ("kl", "full")],
]
LOSSES = [
    *[("f64", mode, name) for mode in ("kl", "full") for name in ("loss_default", "loss_tight")],
    *[("f32", mode, "loss_default") for mode in ("kl", "full")],
]


@cache
def golden() -> dict[str, Any]:
    numbers: dict[str, Any] = json.loads(GOLDEN.read_text())
    return numbers


class Inputs(NamedTuple):
    """A section's inputs on the prediction axis, `[4, 8]`: position p predicts token p + 1."""

    section: dict[str, Any]
    dtype: torch.dtype
    tokens: Tensor
    mask: Tensor
    logits: Tensor
    reference_logits: Tensor
    new_logits: Tensor

    def column(self, *path: str) -> Tensor:
        values: Any = self.section
        for key in path:
            values = values[key]
        return torch.tensor(values, dtype=self.dtype)

    def starts(self) -> list[int]:
        """The position at which each row's response starts."""
        return [length - 1 for length in self.section["query_len"]]

    def to_left(self, x: Tensor) -> Tensor:
        """Shifts every response to the left, as in our batches; `[4, 8]`."""
        return torch.stack([row.roll(-start) for row, start in zip(x, self.starts(), strict=True)])

    def back(self, x: Tensor) -> Tensor:
        """Undoes `to_left`."""
        return torch.stack([row.roll(start) for row, start in zip(x, self.starts(), strict=True)])


def inputs(section: str) -> Inputs:
    big, dtype = golden()["f64"], DTYPES[section]

    def logits(name: str) -> Tensor:
        return torch.tensor(big[name], dtype=dtype)[:, :-1]

    return Inputs(
        section=golden()[section],
        dtype=dtype,
        tokens=torch.tensor(big["input_ids"])[:, 1:],
        mask=torch.tensor(big["out_mask"], dtype=dtype),
        logits=logits("logits_old"),
        reference_logits=logits("logits_ref"),
        new_logits=logits("logits_new"),
    )


def assert_close(ours: Tensor | float, theirs: Tensor | float, tolerance: float) -> None:
    ours, theirs = (torch.as_tensor(x, dtype=torch.float64) for x in (ours, theirs))
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


EXACT = {"f64": 1e-12, "f32": 2e-6}
WHITENED = {"f64": 5e-7, "f32": 5e-6}  # the official code rounds n / (n - 1) to fp32


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Calls the learner's function, which takes flat tensors."""
    sources = torch.arange(tokens.numel())
    return learner_logits.token_logprobs(logits.flatten(0, 1), sources, tokens.flatten(), 1.0)[0].view_as(tokens)


def score_tokens(policy: Tensor, reference: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
    return token_ppo.score_tokens(policy.log_softmax(-1), reference.log_softmax(-1), tokens)


@pytest.mark.parametrize("section", DTYPES)
def test_log_probabilities_agree_at_every_position(section: str) -> None:
    x = inputs(section)
    for logits, name in (
        (x.logits, "out_logprobs"),
        (x.reference_logits, "out_ref_logprobs"),
        (x.new_logits, "out_new_logprobs"),
    ):
        ours = token_logprobs(logits, x.tokens)
        assert ours.dtype == x.dtype
        assert_close(ours, x.column(name), EXACT[section])


@pytest.mark.parametrize("section", DTYPES)
def test_the_entropy_agrees_at_every_position(section: str) -> None:
    x = inputs(section)
    entropy = score_tokens(x.new_logits, x.reference_logits, x.tokens)[1]
    assert_close(entropy, x.column("out_entropy_new"), EXACT[section])
    reported = x.section["mode_kl"]["loss_default"]["stats"]["policy/entropy"]
    assert_close(masked_mean(entropy, x.mask), reported, EXACT[section])


def per_token_kl(x: Inputs, mode: str) -> Tensor:
    if mode == "full":
        return score_tokens(x.logits, x.reference_logits, x.tokens)[3]
    logprobs, reference = (token_logprobs(logits, x.tokens) for logits in (x.logits, x.reference_logits))
    return token_ppo.sampled_kl(logprobs, reference, "k1")


@pytest.mark.parametrize(("section", "mode"), MODES)
def test_the_kl_agrees_per_token_and_per_response(section: str, mode: str) -> None:
    x = inputs(section)
    kl = per_token_kl(x, mode)
    assert_close(kl, x.column(f"mode_{mode}", "kls"), EXACT[section])
    assert_close((kl * x.mask).sum(1).mean(), x.section[f"mode_{mode}"]["objective_kl"], EXACT[section])


def rewards_of(x: Inputs, mode: str, scores: Tensor) -> Tensor:
    """Our token rewards, `[4, 8]` on the prediction axis."""
    kl, mask = x.to_left(per_token_kl(x, mode)), x.to_left(x.mask)
    return x.back(token_ppo.token_rewards(scores, kl, mask, KL_COEF))


@pytest.mark.parametrize(("section", "mode"), MODES)
def test_token_rewards_agree_on_responses_and_are_zero_elsewhere(section: str, mode: str) -> None:
    x = inputs(section)
    scores = x.column("scores")
    assert_close(rewards_of(x, mode, scores), x.column(f"mode_{mode}", "rewards") * x.mask, EXACT[section])
    penalty = x.column(f"mode_{mode}", "non_score_reward") * x.mask
    assert_close(rewards_of(x, mode, torch.zeros_like(scores)), penalty, EXACT[section])


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum() / mask.sum()


def whitened(x: Tensor, mask: Tensor) -> Tensor:
    return token_ppo.whiten(x, mask, token_ppo.masked_moments(x, mask))


@pytest.mark.parametrize(("section", "mode", "gamma", "lam"), GAES)
def test_advantages_and_returns_agree(section: str, mode: str, gamma: float, lam: float) -> None:
    x = inputs(section)
    theirs = f"mode_{mode}", f"gae_wr0_g{gamma}_l{lam}"
    rewards = rewards_of(x, mode, x.column("scores"))
    advantages, returns = token_ppo.gae(rewards, x.column("out_values"), x.mask, gamma, lam)
    assert_close(advantages, x.column(*theirs, "advantages_raw") * x.mask, EXACT[section])
    assert_close(returns, x.column(*theirs, "returns") * x.mask, EXACT[section])
    assert_close(whitened(advantages, x.mask), x.column(*theirs, "advantages_whitened") * x.mask, WHITENED[section])


@pytest.mark.parametrize("mode", ["kl", "full"])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8)])
def test_advantages_of_whitened_rewards_agree(mode: str, gamma: float, lam: float) -> None:
    """The official code masks, then whitens, which leaves (1 - 1/std) * mean on padding, and its GAE includes that.

    Our code zeroes padding after whitening; with a mask of ones it computes the same.
    """
    x = inputs("f64")
    theirs = f"mode_{mode}", f"gae_wr1_g{gamma}_l{lam}"
    rewards, everywhere = rewards_of(x, mode, x.column("scores")), torch.ones_like(x.mask)
    mean = masked_mean(rewards, x.mask)
    rewards = mean + token_ppo.whiten(rewards, everywhere, token_ppo.masked_moments(rewards, x.mask))
    advantages, returns = token_ppo.gae(rewards, x.column("out_values") * x.mask, everywhere, gamma, lam)
    assert_close(advantages * x.mask, x.column(*theirs, "advantages_raw") * x.mask, WHITENED["f64"])
    assert_close(returns * x.mask, x.column(*theirs, "returns") * x.mask, WHITENED["f64"])
    ours = whitened(advantages, x.mask)
    assert_close(ours, x.column(*theirs, "advantages_whitened") * x.mask, WHITENED["f64"])


@pytest.mark.parametrize(("section", "mode", "name"), LOSSES)
def test_losses_clip_fraction_and_gradients_agree(section: str, mode: str, name: str) -> None:
    x = inputs(section)
    theirs, gae = x.section[f"mode_{mode}"][name], (f"mode_{mode}", "gae_wr0_g1.0_l0.95")
    logits = x.new_logits.clone().requires_grad_()
    values = x.column("out_vpreds").requires_grad_()
    logprobs, old = token_logprobs(logits, x.tokens), token_logprobs(x.logits, x.tokens)
    policy, clipped = losses.ppo(logprobs, old, x.column(*gae, "advantages_whitened"), theirs["cliprange"])
    value = token_ppo.value_loss(values, x.column("out_values"), x.column(*gae, "returns"), theirs["cliprange_value"])
    policy_mean, value_mean = masked_mean(policy, x.mask), masked_mean(value, x.mask)
    (policy_mean + theirs["vf_coef"] * value_mean).backward()
    assert_close(policy_mean.detach(), theirs["pg_loss"], WHITENED[section])
    assert_close(theirs["vf_coef"] * value_mean.detach(), theirs["vf_loss_times_coef"], WHITENED[section])
    assert_close(masked_mean(clipped, x.mask), theirs["stats"]["policy/clipfrac"], WHITENED[section])
    assert values.grad is not None and logits.grad is not None
    assert_close(values.grad, x.column(f"mode_{mode}", name, "vpreds_grad"), WHITENED[section])
    assert_close(logits.grad.abs().sum(), theirs["logits_grad_abs_sum"], WHITENED[section])
    assert_close(
        logits.grad[0, x.starts()[0]], x.column(f"mode_{mode}", name, "logits_grad_row0_pos"), WHITENED[section]
    )


@pytest.mark.parametrize("section", DTYPES)
def test_masked_mean_variance_and_whitening_agree(section: str) -> None:
    x = inputs(section)
    data, mask = x.column("masked_ops", "x"), x.column("masked_ops", "mask")
    theirs = x.section["masked_ops"]
    assert_close(masked_mean(data, mask), theirs["masked_mean"], EXACT[section])
    moments = token_ppo.masked_moments(data, mask)
    count, total, squares = moments.tolist()
    variance = (squares / count - (total / count) ** 2) * count / (count - 1)
    assert_close(variance, theirs["masked_var"], WHITENED[section])
    assert_close(whitened(data, mask), x.column("masked_ops", "masked_whiten") * mask, WHITENED[section])


@pytest.mark.parametrize("section", DTYPES)
def test_running_reward_moments_agree_after_every_update(section: str) -> None:
    moments = RewardMoments()
    for step in golden()[section]["running_moments"]:
        scores = torch.tensor(step["x"], dtype=DTYPES[section])
        assert_close(moments.update(scores), step["ret_batch_mean"], WHITENED[section])
        assert_close(moments.mean, step["mean"], WHITENED[section])
        assert_close(moments.variance, step["var"], WHITENED[section])
        assert_close(moments.std, step["std"], WHITENED[section])
        assert moments.count == step["count"]
        for mode, name in (("normalize", "scaled_norm"), ("scale", "scaled_only")):
            ours = moments.scale(scores, mode)  # type: ignore[arg-type]
            assert_close(ours, torch.tensor(step[name], dtype=torch.float64), WHITENED[section])
        assert torch.equal(moments.scale(scores, "none"), scores)


@pytest.mark.parametrize("sequence", range(3))
def test_the_adaptive_kl_coefficient_follows_the_same_sequence(sequence: int) -> None:
    theirs = golden()["adaptive_kl"][sequence]
    kl_coef = theirs["init"]
    for kl, after in theirs["seq_current_value"]:
        kl_coef = token_ppo.adapt_kl_coef(kl_coef, kl, theirs["target"], theirs["n_steps"], theirs["horizon"])
        assert_close(kl_coef, after, 1e-12)
