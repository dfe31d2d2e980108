"""Plain implementations of the formulas, as references for the fast ones."""

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability of each of the tokens `[B, T]` under logits `[B, T, V]`."""
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(dim=-1)


def entropy(logits: Tensor) -> Tensor:
    """Entropy of each distribution, `[B, T]`."""
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def full_kl(logits: Tensor, reference_logits: Tensor) -> Tensor:
    """KL of each distribution to its reference, `[B, T]`."""
    policy, reference = torch.log_softmax(logits, -1), torch.log_softmax(reference_logits, -1)
    return (policy.exp() * (policy - reference)).sum(-1)
