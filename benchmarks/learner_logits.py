"""Changes of `benchmarks.learner_ab` to how log-probabilities are computed from hidden states."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks.learner_changes import CHANGES as CHANGES
from benchmarks.learner_changes import Skip, attributes, change
from policies.learning import policy_model, token_ppo
from policies.learning.forward import logits as logits_module

if TYPE_CHECKING:
    from benchmarks.learner_ab import Bench


def _log_norms(logits: Tensor, temperature: float) -> Tensor:
    return (logits.float() / temperature).logsumexp(-1)


def _logit_gradients(logits: Tensor, norms: Tensor, outputs: Tensor, temperature: float) -> Tensor:
    return (((logits.float() / temperature - norms[:, None]).exp() * (-outputs[:, None])) / temperature).to(
        logits.dtype
    )


def _scores(policy: Tensor, reference: Tensor | None, tokens: Tensor, temperature: float) -> tuple[Tensor, ...]:
    policy = (policy.float() / temperature).log_softmax(-1)
    reference = None if reference is None else (reference.float() / temperature).log_softmax(-1)
    return token_ppo.score_tokens(policy, reference, tokens)


def _add_tokens(gradients: Tensor, sources: Tensor, tokens: Tensor, outputs: Tensor, temperature: float) -> None:
    """Adds the one-hot part of the gradient; a node may predict several tokens."""
    at = sources * gradients.shape[1] + tokens
    gradients.view(-1).index_put_((at,), (outputs / temperature).to(gradients.dtype), accumulate=True)


class WholeLogprobs(torch.autograd.Function):
    """`logits._TokenLogprobs` without chunks, for a compiler that fuses each pass over the logits into one kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        sources: Tensor,
        tokens: Tensor,
        temperature: float,
        norms_of: Callable[..., Tensor],
        gradients_of: Callable[..., Tensor],
    ) -> Tensor:
        """Returns the log-probabilities."""
        norms = norms_of(logits, temperature)
        ctx.save_for_backward(logits, sources, tokens, norms)
        ctx.temperature, ctx.gradients_of = temperature, gradients_of
        return logits[sources, tokens].float() / temperature - norms[sources]

    @staticmethod
    def backward(ctx: Any, outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradient of the logits."""
        logits, sources, tokens, norms = ctx.saved_tensors
        sums = logits_module._add_at(torch.zeros_like(norms), sources, outputs)
        gradients = ctx.gradients_of(logits, norms, sums, ctx.temperature)
        _add_tokens(gradients, sources, tokens, outputs, ctx.temperature)
        return gradients, None, None, None, None, None


@change
def logprobs(bench: Bench) -> Iterator[None]:
    """Log-probabilities, entropy and KL by compiled functions over all logits at once, instead of eagerly in chunks."""
    norms_of, gradients_of, scores = (bench.compiled(f) for f in (_log_norms, _logit_gradients, _scores))

    def token_logprobs(
        logits: Tensor, sources: Tensor, tokens: Tensor, temperature: float, with_entropy: bool = False
    ) -> tuple[Tensor, None]:
        if with_entropy:
            raise Skip("not written for entropy_coef")
        return WholeLogprobs.apply(logits, sources, tokens, temperature, norms_of, gradients_of), None

    def score_logits(
        policy: Tensor, reference: Tensor | None, sources: Tensor, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, ...]:
        parts = []
        for chunk in torch.arange(len(tokens), device=tokens.device).split(bench.chunk):
            at = sources[chunk]
            parts.append(scores(policy[at], None if reference is None else reference[at], tokens[chunk], temperature))
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    with attributes((policy_model, "token_logprobs", token_logprobs), (policy_model, "score_logits", score_logits)):
        yield


class ChunkedHead(torch.autograd.Function):
    """Log-probabilities from the last hidden states; logits exist for a chunk at a time, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        sources: Tensor,
        tokens: Tensor,
        temperature: float,
        chunk: int,
        norms_of: Callable[..., Tensor],
        gradients_of: Callable[..., Tensor],
    ) -> Tensor:
        """Returns the log-probabilities."""
        norms = hidden.new_empty(len(hidden), dtype=torch.float32)
        at_tokens = hidden.new_empty(len(tokens), dtype=torch.float32)
        for start in range(0, len(hidden), chunk):
            logits = hidden[start : start + chunk] @ weight.t()
            norms[start : start + chunk] = norms_of(logits, temperature)
            within, at = _within(sources, start, len(logits))
            at_tokens = torch.where(within, logits[at, tokens].float(), at_tokens)
        ctx.save_for_backward(hidden, weight, sources, tokens, norms)
        ctx.rest = temperature, chunk, gradients_of
        return at_tokens / temperature - norms[sources]

    @staticmethod
    def backward(ctx: Any, outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the hidden states and of the head's weight."""
        hidden, weight, sources, tokens, norms = ctx.saved_tensors
        temperature, chunk, gradients_of = ctx.rest
        sums = logits_module._add_at(torch.zeros_like(norms), sources, outputs)
        hidden_gradient, weight_gradient = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(hidden), chunk):
            part = hidden[start : start + chunk]
            logits = part @ weight.t()
            gradients = gradients_of(logits, norms[start : start + chunk], sums[start : start + chunk], temperature)
            within, at = _within(sources, start, len(logits))
            _add_tokens(gradients, at, tokens, outputs * within, temperature)
            hidden_gradient[start : start + chunk] = gradients @ weight
            weight_gradient += gradients.t() @ part
        return hidden_gradient, weight_gradient.to(weight.dtype), None, None, None, None, None, None


def _within(sources: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    return (sources >= start) & (sources < start + count), (sources - start).clamp(0, count - 1)


def _headless(bench: Bench, token_logprobs: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """The head hands on the hidden states; log-probabilities are computed from them and its weight."""
    heads = [lm.get_output_embeddings() for lm in bench.lms()]
    scores = bench.compiled(_scores)

    def score_logits(
        policy: Tensor, reference: Tensor | None, sources: Tensor, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, ...]:
        weights = [head.weight.to(policy.dtype) for head in heads]
        parts = []
        for chunk in torch.arange(len(tokens), device=tokens.device).split(bench.chunk):
            at = sources[chunk]
            both = [None if h is None else h[at] @ w.t() for h, w in zip((policy, reference), weights, strict=False)]
            both += [None] * (2 - len(both))
            parts.append(scores(*both, tokens[chunk], temperature))
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def pass_on(hidden: Tensor) -> Tensor:
        return hidden.to(bench.dtype)

    return attributes(
        *((head, "forward", pass_on) for head in heads),
        (policy_model, "token_logprobs", partial(token_logprobs, heads[0])),
        (policy_model, "score_logits", score_logits),
    )


@change
def head(bench: Bench) -> Iterator[None]:
    """No logits of the whole micro-batch: the head's product, chunk by chunk, with compiled functions over it."""
    norms_of, gradients_of = (bench.compiled(f) for f in (_log_norms, _logit_gradients))

    def token_logprobs(
        layer: nn.Linear,
        hidden: Tensor,
        sources: Tensor,
        tokens: Tensor,
        temperature: float,
        with_entropy: bool = False,
    ) -> tuple[Tensor, None]:
        weight = layer.weight.to(hidden.dtype)
        args = sources, tokens, temperature, bench.chunk, norms_of, gradients_of
        return ChunkedHead.apply(hidden, weight, *args), None

    with _headless(bench, token_logprobs):
        yield


@change
def ligerhead(bench: Bench) -> Iterator[None]:
    """The same by liger-kernel's CuTe kernel for Hopper; without nvidia-cutlass-dsl by its plain PyTorch chunks."""
    bench.need_triton()
    from liger_kernel.ops import fused_linear_scaled_cross_entropy as module

    plain = module._FusedLinearPPOFallbackFunction
    try:
        implementation = module._resolve_implementation(bench.device)
    except ImportError as error:
        bench.notes.append(f"no CuTe kernel ({error}), plain chunks of 512")
        implementation = plain
    args = (-100, False) if implementation is plain else (-100, 1, False)

    def token_logprobs(
        layer: nn.Linear,
        hidden: Tensor,
        sources: Tensor,
        tokens: Tensor,
        temperature: float,
        with_entropy: bool = False,
    ) -> tuple[Tensor, None]:
        picked = hidden[sources].contiguous()
        return -implementation.apply(picked, layer.weight.to(hidden.dtype), tokens, temperature, *args).float(), None

    with _headless(bench, token_logprobs):
        yield
