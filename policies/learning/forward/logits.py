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

CHUNK_LOGITS = {"cpu": 2**22, "cuda": 2**25}
"""Logits per chunk by type of device. A GPU waits for the launch of each chunk's kernels, so it gets fewer chunks."""


def token_logprobs(
    logits: Tensor, sources: Tensor, tokens: Tensor, temperature: float, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Differentiable log-probability of each token under the logits that predict it, divided by a temperature.

    The backward pass needs only the logits and one number per position, two with the entropy.

    Args:
        logits: `[N, V]`, any float type.
        sources: int64 `[E]`, for each token the logits that predict it; several tokens may have the same.
        tokens: `[E]` token ids.
        temperature: above 0.

    Returns:
        The log-probabilities, and the entropy over the vocabulary or None; `[E]`, in nats, fp32 or better.
    """
    logprobs, entropy = _TokenLogprobs.apply(logits, sources, tokens, temperature, with_entropy)
    return logprobs, entropy


def score_logits(
    policy: Tensor, reference: Tensor | None, sources: Tensor, tokens: Tensor, temperature: float
) -> tuple[Tensor, ...]:
    """`token_ppo.score_tokens` from the logits of a policy and its reference, without a gradient.

    Args:
        policy: logits `[N, V]`, as in `token_logprobs`.
        reference: logits `[N, V]`; None: no reference.
        sources: int64 `[E]`.
        tokens: `[E]` token ids.

    Returns:
        The results of `token_ppo.score_tokens`, `[E]` each, fp32 or better.
    """
    count = 2 if reference is None else 4
    scores = [torch.empty(tokens.shape, dtype=master_dtype(policy.dtype), device=tokens.device) for _ in range(count)]
    for chunk in _chunks(policy, len(tokens)):
        policy_logprobs, reference_logprobs = (
            None if logits is None else _scale_logits(logits[sources[chunk]], temperature, copy=False).log_softmax(-1)
            for logits in (policy, reference)
        )
        assert policy_logprobs is not None
        chunk_scores = token_ppo.score_tokens(policy_logprobs, reference_logprobs, tokens[chunk])
        for score, chunk_score in zip(scores, chunk_scores, strict=True):
            score[chunk] = chunk_score
    return tuple(scores)


class _TokenLogprobs(torch.autograd.Function):
    """Log-probabilities of tokens under logits, and the entropy H.

    With p = softmax, the gradients are (one_hot(token) - p) / temperature, and -p · (log p + H) / temperature.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, sources: Tensor, tokens: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        norms = torch.empty(len(logits), dtype=master_dtype(logits.dtype), device=logits.device)
        entropy = torch.empty_like(norms) if with_entropy else None
        for chunk in _chunks(logits, len(logits)):
            scaled = _scale_logits(logits[chunk], temperature)
            norms[chunk] = scaled.logsumexp(-1)
            if entropy is not None:
                scaled.sub_(norms[chunk, None])
                entropy[chunk] = -(scaled.exp() * scaled).sum(-1)
        ctx.save_for_backward(logits, sources, tokens, norms, entropy)
        ctx.temperature = temperature
        logprobs = _scale_logits(logits[sources, tokens], temperature) - norms[sources]
        return logprobs, None if entropy is None else entropy[sources]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, sources, tokens, norms, entropy = ctx.saved_tensors
        grad = torch.empty_like(logits)
        position_grads = [None if g is None else _add_at(torch.zeros_like(norms), sources, g) for g in gradients]
        output_grad, entropy_grad = position_grads
        for chunk in _chunks(logits, len(logits)):
            part = _scale_logits(logits[chunk], ctx.temperature).sub_(norms[chunk, None])
            if entropy is None:
                part = part.exp_().mul_(-output_grad[chunk, None])
            else:
                probabilities = part.exp()
                part = part.add_(entropy[chunk, None]).mul_(entropy_grad[chunk, None]).add_(output_grad[chunk, None])
                part = part.neg_().mul_(probabilities)
            within = (sources >= chunk.start) & (sources < chunk.stop)
            positions = (sources - chunk.start).clamp(0, len(part) - 1)
            _add_at(part.view(-1), positions * part.shape[1] + tokens, gradients[0] * within)
            grad[chunk] = _divide(part, ctx.temperature)
        return grad, None, None, None, None


def _add_at(target: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Adds values `[E]` to a vector in place, in an order that does not vary from call to call."""
    if target.is_cuda:  # there `index_add_` is atomic; on a CPU, `index_put_` is not deterministic
        return target.index_put_((index,), values, accumulate=True)
    return target.index_add_(0, index, values)


def _chunks(logits: Tensor, count: int) -> Iterator[slice]:
    size = max(CHUNK_LOGITS[logits.device.type] // logits.shape[1], 1)
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _scale_logits(logits: Tensor, temperature: float, copy: bool = True) -> Tensor:
    """Returns logits in fp32 or better, divided by the temperature; without `copy` they may be overwritten."""
    return _divide(logits.to(master_dtype(logits.dtype), copy=copy), temperature)


def _divide(values: Tensor, temperature: float) -> Tensor:
    """Divides in place."""
    return values if temperature == 1.0 else values.div_(temperature)
