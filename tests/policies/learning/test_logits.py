"""Log-probabilities and gradients computed in chunks equal those of the plain formulas."""

import pytest
import torch
from torch import Tensor

from policies.learning import token_ppo
from policies.learning.forward import logits
from tests.policies.learning import plain_formulas
from tests.policies.learning.plain_formulas import token_logprobs

BATCH, POSITIONS, LENGTH, VOCABULARY = 3, 9, 5, 11
TEMPERATURE = 0.7


@pytest.fixture(params=[1, BATCH * VOCABULARY * 2, 2**22], ids=["one position", "uneven chunks", "one chunk"])
def chunk_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logits.CHUNK_LOGITS, "cpu", request.param)


def model_logits(dtype: torch.dtype, seed: int = 0) -> Tensor:
    random = 3 * torch.randn(BATCH, POSITIONS, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    return random.to(dtype).requires_grad_()


def plain(model_output: Tensor) -> Tensor:
    """The logits that predict the tokens, as input of the plain formulas."""
    return model_output[:, -LENGTH - 1 : -1].float() / TEMPERATURE


SOURCES = (torch.arange(BATCH)[:, None] * POSITIONS + POSITIONS - LENGTH - 1 + torch.arange(LENGTH)).flatten()
"""The positions of the flattened logits that predict the tokens."""
TOKENS = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
GRADIENT = torch.randn(BATCH, LENGTH, generator=torch.Generator().manual_seed(2))


def logprobs_and_entropy(model_output: Tensor, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
    """Of all tokens, `[BATCH, LENGTH]`."""
    logprobs, entropy = logits.token_logprobs(
        model_output.flatten(0, 1), SOURCES, TOKENS.flatten(), TEMPERATURE, with_entropy
    )
    return logprobs.view_as(TOKENS), None if entropy is None else entropy.view_as(TOKENS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_and_gradients_are_exactly_those_of_the_formula(chunk_size: None, dtype: torch.dtype) -> None:
    ours, theirs = model_logits(dtype), model_logits(dtype)
    logprobs, entropy = logprobs_and_entropy(ours)
    assert entropy is None
    expected = token_logprobs(plain(theirs), TOKENS)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=0)
    logprobs.backward(GRADIENT)
    expected.backward(GRADIENT)
    assert ours.grad is not None and ours.grad.dtype == dtype
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)
    assert not ours.grad[:, : POSITIONS - LENGTH - 1].any() and not ours.grad[:, -1].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_entropy_and_its_gradient_are_those_of_the_formula(chunk_size: None, dtype: torch.dtype) -> None:
    ours, theirs = model_logits(dtype), model_logits(dtype)
    logprobs, entropy = logprobs_and_entropy(ours, with_entropy=True)
    assert entropy is not None
    predicting = theirs[:, -LENGTH - 1 : -1].to(logprobs.dtype) / TEMPERATURE
    expected_logprobs, expected = token_logprobs(predicting, TOKENS), plain_formulas.entropy(predicting)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-6}[dtype]
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(entropy, expected, rtol=tolerance, atol=tolerance)
    (logprobs * GRADIENT - 0.3 * entropy * GRADIENT.flip(0)).sum().backward()
    (expected_logprobs * GRADIENT - 0.3 * expected * GRADIENT.flip(0)).sum().backward()
    tolerance = 1e-2 if dtype == torch.bfloat16 else tolerance
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def test_scores_are_those_of_the_formulas(chunk_size: None) -> None:
    policy, reference = model_logits(torch.float32), model_logits(torch.float32, seed=3)
    scores = logits.score_logits(policy.flatten(0, 1), reference.flatten(0, 1), SOURCES, TOKENS.flatten(), TEMPERATURE)
    expected = token_ppo.score_tokens(plain(policy).log_softmax(-1), plain(reference).log_softmax(-1), TOKENS)
    for ours, theirs in zip(scores, expected, strict=True):
        torch.testing.assert_close(ours.view_as(theirs), theirs, rtol=0, atol=0)


def test_autograd_saves_no_large_tensor_but_the_logits() -> None:
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    model_output = model_logits(torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        logprobs_and_entropy(model_output, with_entropy=True)
    large = [tensor for tensor in saved if tensor.numel() > BATCH * POSITIONS]
    assert [tensor.data_ptr() for tensor in large] == [model_output.data_ptr()]
