"""Log-probabilities a few positions at a time are those of the plain formulas, and so are their gradients."""

import pytest
import torch
from torch import Tensor

from policies.learning import logits, token_ppo
from tests.policies.learning.plain_formulas import token_logprobs

BATCH, POSITIONS, LENGTH, VOCABULARY = 3, 9, 5, 11
TEMPERATURE = 0.7


@pytest.fixture(params=[1, BATCH * VOCABULARY * 2, 2**22], ids=["one position", "uneven parts", "all at once"])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits, "AT_ONCE", request.param)


def model_logits(dtype: torch.dtype, seed: int = 0) -> Tensor:
    drawn = 3 * torch.randn(BATCH, POSITIONS, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    return drawn.to(dtype).requires_grad_()


def plain(given: Tensor) -> Tensor:
    """What predicted the tokens, as the formulas take it."""
    return given[:, -LENGTH - 1 : -1].float() / TEMPERATURE


TOKENS = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
GRADIENT = torch.randn(BATCH, LENGTH, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_and_gradients_are_exactly_those_of_the_formula(at_once: None, dtype: torch.dtype) -> None:
    ours, theirs = model_logits(dtype), model_logits(dtype)
    found = logits.token_logprobs(ours, TOKENS, TEMPERATURE)
    expected = token_logprobs(plain(theirs), TOKENS)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    found.backward(GRADIENT)
    expected.backward(GRADIENT)
    assert ours.grad is not None and ours.grad.dtype == dtype
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)
    assert not ours.grad[:, : POSITIONS - LENGTH - 1].any() and not ours.grad[:, -1].any()


@torch.no_grad()
def test_scores_are_those_of_the_formulas(at_once: None) -> None:
    policy, reference = model_logits(torch.float32), model_logits(torch.float32, seed=3)
    both = (plain(policy).log_softmax(-1), plain(reference).log_softmax(-1))
    for found, expected in zip(
        logits.score_logits(policy, reference, TOKENS, TEMPERATURE), token_ppo.score_tokens(*both, TOKENS), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_nothing_as_large_as_the_logits_is_kept_but_themselves() -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    given = model_logits(torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits.token_logprobs(given, TOKENS, TEMPERATURE)
    large = [tensor for tensor in kept if tensor.numel() > BATCH * POSITIONS]
    assert [tensor.data_ptr() for tensor in large] == [given.data_ptr()]
