"""What is asked of a model's logits, a few positions at a time, so that no other tensor of their size is made.

With a large vocabulary logits are the largest tensors of an update by far. A softmax of all of them in fp32, and what
autograd would keep of it, take several times the memory of what the model computed, which may be bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from policies.learning import token_ppo
from policies.models.language_model import master_dtype

AT_ONCE = 2**22
"""Logits that are looked at together: 16 MiB of fp32."""


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Log-probability of each token under the logits that predicted it, divided by a temperature; with its gradient.

    Kept for the backward pass are the logits themselves and a number for each position.

    Args:
        logits: `[B, S, V]` of a model, of any float type; of the last R + 1 positions all but the last predict tokens.
        tokens: `[B, R]` token ids.
        temperature: above 0.

    Returns:
        `[B, R]`, in nats, fp32 or better.
    """
    found: Tensor = _TokenLogprobs.apply(logits, tokens, temperature)
    return found


def scores(policy: Tensor, reference: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """What `token_ppo.compare` gives of a policy's and its reference's logits, without a gradient.

    Args:
        policy, reference: as `token_logprobs` takes them.
        tokens: `[B, R]` token ids.
        temperature: above 0.

    Returns:
        Four of `[B, R]`, fp32 or better.
    """
    found = [torch.empty(tokens.shape, dtype=master_dtype(policy.dtype), device=tokens.device) for _ in range(4)]
    for here, there in _parts(policy, tokens):
        one, other = (_scaled(logits[:, there], temperature).log_softmax(-1) for logits in (policy, reference))
        for whole, part in zip(found, token_ppo.compare(one, other, tokens[:, here]), strict=True):
            whole[:, here] = part
    return tuple(found)


class _TokenLogprobs(torch.autograd.Function):
    """Log-probabilities of tokens under logits, whose gradient is (1 at the token - softmax) / temperature."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        logprobs = torch.empty(tokens.shape, dtype=master_dtype(logits.dtype), device=tokens.device)
        norms = torch.empty_like(logprobs)
        for here, there in _parts(logits, tokens):
            part = _scaled(logits[:, there], temperature)
            norms[:, here] = part.logsumexp(-1)
            logprobs[:, here] = part.gather(-1, tokens[:, here, None]).squeeze(-1) - norms[:, here]
        ctx.save_for_backward(logits, tokens, norms)
        ctx.temperature = temperature
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, tokens, norms = ctx.saved_tensors
        gradient = gradients[0].unsqueeze(-1)
        found = torch.zeros_like(logits)
        for here, there in _parts(logits, tokens):
            part = _scaled(logits[:, there], ctx.temperature)
            part = part.sub_(norms[:, here, None]).exp_().mul_(-gradient[:, here])
            found[:, there] = part.scatter_add_(-1, tokens[:, here, None], gradient[:, here]).div_(ctx.temperature)
        return found, None, None


def _parts(logits: Tensor, tokens: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yields parts of the tokens, each with the positions of the logits that predict it."""
    batch, positions, vocabulary = logits.shape
    length = tokens.shape[1]
    before = positions - length - 1
    size = max(AT_ONCE // (batch * vocabulary), 1)
    for start in range(0, length, size):
        end = min(start + size, length)
        yield slice(start, end), slice(before + start, before + end)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """A copy in fp32 or better, divided by the temperature."""
    return logits.to(master_dtype(logits.dtype), copy=True).div_(temperature)
