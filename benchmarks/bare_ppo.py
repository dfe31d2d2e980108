"""The learner's arithmetic as a plain PyTorch loop, without RLlib, written to be fast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from policies.models.language_model import compute_dtype, eager_is_faster, load_language_model
from policies.settings.settings import Settings


class Sample(NamedTuple):
    """One response with its training data."""

    prompt: list[int]
    response: list[int]
    reward: float


Columns = dict[str, Tensor]


class BarePPO:
    """One policy with its value head and Adam, and a reference that policies share."""

    def __init__(self, settings: Settings, reference: PreTrainedModel | None = None) -> None:
        """Loads the policy, and the reference unless one is given."""
        self.settings = settings
        self.lm = load_language_model(settings.model_paths["llm_1"])
        self.reference = reference or load_language_model(settings.model_paths["llm_1"]).requires_grad_(False)
        self.head = nn.Linear(self.lm.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.parameters = [*self.lm.parameters(), *self.head.parameters()]
        self.adam = torch.optim.Adam(self.parameters, lr=settings.learning_rate)
        self.dtype = compute_dtype(settings.dtype, torch.device("cpu"))
        for lm in (self.lm, self.reference):
            if eager_is_faster(self.dtype, torch.device("cpu"), settings.prompt_limit + settings.max_response_tokens):
                lm.set_attn_implementation("eager")
        self.random = np.random.default_rng(settings.seed)

    def update(self, samples: Sequence[Sample], reported: bool) -> None:
        """One PPO update.

        Args:
            samples: the batch.
            reported: also compute what a run only reports: entropy, and the KL over the vocabulary.
        """
        s = self.settings
        scored: list[Columns] = [{}] * len(samples)
        for indices in self._micro_batches(np.arange(len(samples)), samples, s.micro_batch_size):
            rows = self._score([samples[index] for index in indices], reported)
            for row, index in enumerate(indices):
                length = len(samples[index].response)
                scored[index] = {name: column[row, :length] for name, column in rows.items()}
        advantages = torch.cat([columns["advantages"] for columns in scored])
        mean, deviation = advantages.mean(), advantages.std()
        for columns in scored:
            columns["advantages"] = (columns["advantages"] - mean) / deviation
        for _ in range(s.num_epochs):
            order = self.random.permutation(len(samples))
            for start in range(0, len(samples), s.responses_per_step):
                self._step(order[start : start + s.responses_per_step], samples, scored)

    def _micro_batches(self, indices: np.ndarray, samples: Sequence[Sample], size: int) -> list[list[int]]:
        """Rows of similar length together, so that little is padded."""
        order = sorted(indices.tolist(), key=lambda index: (len(samples[index].prompt), len(samples[index].response)))
        return [order[start : start + size] for start in range(0, len(order), size)]

    @torch.no_grad()
    def _score(self, samples: Sequence[Sample], reported: bool) -> Columns:
        """Old log-probabilities, reference log-probabilities, values, and from them advantages and returns."""
        s = self.settings
        tokens, attention, mask = pad(samples)
        chosen = tokens[:, -mask.shape[1] :]
        logits, values = self._forward(self.lm, tokens, attention, mask.shape[1])
        reference_logits, _ = self._forward(self.reference, tokens, attention, mask.shape[1])
        old, reference = token_logprobs(logits, chosen), token_logprobs(reference_logits, chosen)
        if reported:
            log_p, log_q = F.log_softmax(logits, -1), F.log_softmax(reference_logits, -1)
            p = log_p.exp()
            self.entropy, self.kl = -(p * log_p).sum(), (p * (log_p - log_q)).sum()
        rewards = -s.kl_coef * (old - reference) * mask
        rewards[torch.arange(len(samples)), mask.long().sum(1) - 1] += torch.tensor([x.reward for x in samples])
        values = values * mask
        advantages, running, following = torch.zeros_like(rewards), torch.zeros(len(samples)), torch.zeros(len(samples))
        for t in range(mask.shape[1] - 1, -1, -1):
            running = rewards[:, t] + s.gamma * following - values[:, t] + s.gamma * s.lam * running
            advantages[:, t], following = running, values[:, t]
        return {"old": old, "values": values, "advantages": advantages, "returns": advantages + values}

    def _step(self, indices: np.ndarray, samples: Sequence[Sample], scored: Sequence[Columns]) -> None:
        """One optimizer step on a mini-batch."""
        s = self.settings
        count = sum(len(samples[index].response) for index in indices)
        self.adam.zero_grad(set_to_none=True)
        for micro in self._micro_batches(indices, samples, s.micro_batch_size):
            tokens, attention, mask = pad([samples[index] for index in micro])
            old, old_values, advantages, returns = (
                nn.utils.rnn.pad_sequence([scored[index][name] for index in micro], batch_first=True)
                for name in ("old", "values", "advantages", "returns")
            )
            logits, values = self._forward(self.lm, tokens, attention, mask.shape[1])
            ratio = (token_logprobs(logits, tokens[:, -mask.shape[1] :]) - old).exp()
            low, high = s.clip_range
            policy = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
            bounded = old_values + (values - old_values).clamp(-s.value_clip, s.value_clip)
            value = 0.5 * torch.maximum((values - returns) ** 2, (bounded - returns) ** 2)
            (((policy + s.value_coef * value) * mask).sum() / count).backward()
        nn.utils.clip_grad_norm_(self.parameters, s.grad_clip or float("inf"))
        self.adam.step()

    def _forward(self, lm: PreTrainedModel, tokens: Tensor, attention: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Logits `[B, R, V]` and values `[B, R]` at the response's tokens alone."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            hidden = lm.transformer(
                tokens,
                attention_mask=attention,
                position_ids=(attention.cumsum(1) - 1).clamp(min=0),
                use_cache=False,
            ).last_hidden_state[:, -length - 1 : -1]
            logits = lm.lm_head(hidden)
        return logits.float() / self.settings.temperature, self.head(hidden.float()).squeeze(-1)


def pad(samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """Pads prompts on the left and responses on the right.

    Returns:
        Tokens and attention mask, int64 `[B, P + R]`, and the mask of the response's tokens, fp32 `[B, R]`.
    """
    left, right = max(len(x.prompt) for x in samples), max(len(x.response) for x in samples)
    tokens = np.zeros((len(samples), left + right), np.int64)
    attention = np.zeros_like(tokens)
    for row, x in enumerate(samples):
        tokens[row, left - len(x.prompt) : left + len(x.response)] = x.prompt + x.response
        attention[row, left - len(x.prompt) : left + len(x.response)] = 1
    full_mask = torch.from_numpy(attention)
    return torch.from_numpy(tokens), full_mask, full_mask[:, left:].float()


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability of each token, `[B, R]`."""
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
