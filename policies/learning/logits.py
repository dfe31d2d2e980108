"""Log-probabilities, entropy and KL from logits, in chunks of positions, without another tensor of the logits' size.

With a large vocabulary, logits are by far the largest tensors of an update. Their softmax in fp32 and the tensors that
autograd saves for it would take several times the memory of the logits, which may be bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from policies.learning import token_ppo
from policies.models.language_model import master_dtype

CHUNK_LOGITS = 2**22
"""Logits per chunk: 16 MiB of fp32."""


def token_logprobs(
    logits: Tensor, tokens: Tensor, temperature: float, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Differentiable log-probability of each token under the logits that predict it, divided by a temperature.

    The backward pass needs only the logits and one number per position, two with the entropy.

    Args:
        logits: `[B, S, V]`, any float type. Of the last R + 1 positions, all but the last predict the tokens.
        tokens: `[B, R]` token ids.
        temperature: above 0.
        with_entropy: also compute the differentiable entropy.

    Returns:
        The log-probabilities, and the entropy over the vocabulary or None; `[B, R]`, in nats, fp32 or better.
    """
    logprobs, entropy = _TokenLogprobs.apply(logits, tokens, temperature, with_entropy)
    return logprobs, entropy


def score_logits(policy: Tensor, reference: Tensor | None, tokens: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """`token_ppo.score_tokens` from the logits of a policy and its reference, without a gradient.

    Args:
        policy: logits `[B, S, V]`, as in `token_logprobs`.
        reference: logits `[B, S, V]`; None: no reference.
        tokens: `[B, R]` token ids.
        temperature: above 0.

    Returns:
        The results of `token_ppo.score_tokens`, `[B, R]` each, fp32 or better.
    """
    count = 2 if reference is None else 4
    scores = [torch.empty(tokens.shape, dtype=master_dtype(policy.dtype), device=tokens.device) for _ in range(count)]
    for chunk, positions in _chunks(policy, tokens):
        policy_logprobs, reference_logprobs = (
            None if logits is None else _scale_logits(logits[:, positions], temperature).log_softmax(-1)
            for logits in (policy, reference)
        )
        assert policy_logprobs is not None
        chunk_scores = token_ppo.score_tokens(policy_logprobs, reference_logprobs, tokens[:, chunk])
        for score, chunk_score in zip(scores, chunk_scores, strict=True):
            score[:, chunk] = chunk_score
    return tuple(scores)


class _TokenLogprobs(torch.autograd.Function):
    """Log-probabilities of tokens under logits, and the entropy H.

    With p = softmax, the gradients are (one_hot(token) - p) / temperature, and -p · (log p + H) / temperature.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        logprobs = torch.empty(tokens.shape, dtype=master_dtype(logits.dtype), device=tokens.device)
        norms = torch.empty_like(logprobs)
        entropy = torch.empty_like(logprobs) if with_entropy else None
        for chunk, positions in _chunks(logits, tokens):
            scaled = _scale_logits(logits[:, positions], temperature)
            norms[:, chunk] = scaled.logsumexp(-1)
            logprobs[:, chunk] = scaled.gather(-1, tokens[:, chunk, None]).squeeze(-1) - norms[:, chunk]
            if entropy is not None:
                scaled.sub_(norms[:, chunk, None])
                entropy[:, chunk] = -(scaled.exp() * scaled).sum(-1)
        ctx.save_for_backward(logits, tokens, norms, entropy)
        ctx.temperature = temperature
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        logits, tokens, norms, entropy = ctx.saved_tensors
        output_grad = gradients[0].unsqueeze(-1)
        grad = torch.zeros_like(logits)
        for chunk, positions in _chunks(logits, tokens):
            part = _scale_logits(logits[:, positions], ctx.temperature).sub_(norms[:, chunk, None])
            if entropy is None:
                part = part.exp_().mul_(-output_grad[:, chunk])
            else:
                probabilities, entropy_grad = part.exp(), gradients[1][:, chunk, None]
                part = part.add_(entropy[:, chunk, None]).mul_(entropy_grad).add_(output_grad[:, chunk])
                part = part.neg_().mul_(probabilities)
            part = part.scatter_add_(-1, tokens[:, chunk, None], output_grad[:, chunk])
            grad[:, positions] = part.div_(ctx.temperature)
        return grad, None, None, None


def _chunks(logits: Tensor, tokens: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yields slices of the tokens, and of the positions of the logits that predict them."""
    batch, positions, vocabulary = logits.shape
    length = tokens.shape[1]
    offset = positions - length - 1
    size = max(CHUNK_LOGITS // (batch * vocabulary), 1)
    for start in range(0, length, size):
        end = min(start + size, length)
        yield slice(start, end), slice(offset + start, offset + end)


def _scale_logits(logits: Tensor, temperature: float) -> Tensor:
    """Returns a copy in fp32 or better, divided by the temperature."""
    return logits.to(master_dtype(logits.dtype), copy=True).div_(temperature)
