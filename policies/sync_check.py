"""The weight-sync check: whether the generation engine uses the learner's weights, at start and during training.

Engines can silently keep old weights: a tied head packed once at load time, activations cached under the old weights,
an update that never arrives. In bf16, rounding hides the difference of one small update. So at start every policy is
perturbed strongly and restored, and the engine's log-probabilities must match the learner's each time. During training,
the log-probabilities of sampled responses are compared too: the difference of an engine with old weights grows with
every update. How much of it is rounding depends on the model and the device, so the limit is relative to the start's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from cory_env.tasks import Task
from policies.generation.generator import Response
from policies.learning.rows import Rows, ScoredRows, make_rows
from policies.models.weights import Weights
from policies.rllib.learners import Learners
from policies.rollout.episodes import Rollout
from policies.rollout.runners import Runners, WeightSyncError
from policies.settings.settings import Settings

_NOISE = 0.1  # of each tensor's root mean square; with 0.3, bf16's rounding grows tenfold over 30 layers
_ZERO_NOISE = 0.15  # for all-zero tensors, such as an adapter's second matrix at start; bf16 rounding hides less
_NOISE_LENGTH = 100_003  # numbers that repeat, as drawing is slow; a prime, so that rows of a matrix get different ones
_NUM_QUERIES = 16  # of a check without an update's responses
# Allowed deviation as a share of the perturbation's effect, besides twice the rounding difference, by compute type.
_TOLERANCE = {torch.float32: 0.005, torch.bfloat16: 0.05}
# Lowest limit of mean |sampler - learner| log-probability, in nats per token, by compute type: several times the
# effect of rounding in small models; with vLLM on a GPU, whose attention multiplies in TF32, up to 0.001 on an H200.
_MIN_LIMIT = {torch.float32: 0.001, torch.bfloat16: 0.05}
_MIN_LIMIT_TF32 = 0.005
_LIMIT_RANGE = 10  # highest limit / lowest; rounding explains no more, even if the difference was as large at start
_GROWTH = 3  # times as large as at start: training changes the responses and their rounding
_STANDARD_ERRORS = 3  # of the means, at start and now, that do not count


class WeightSyncCheckError(RuntimeError):
    """The engine does not use the learner's weights; training on its responses would be silently wrong."""


class LogprobDiff(NamedTuple):
    """|sampler - learner| log-probability of response tokens, in nats."""

    mean: float
    std: float
    tokens: int

    @classmethod
    def measure(cls, rows: Rows, logprobs: torch.Tensor) -> LogprobDiff:
        """Compares the sampler's log-probabilities in rows with the learner's, `[B, R]`."""
        diffs = (rows.sampler_logprobs - logprobs).abs()[rows.mask.bool()]
        return cls(float(diffs.mean()), float(diffs.std(correction=0)), len(diffs))

    def merge(self, other: LogprobDiff) -> LogprobDiff:
        """Returns the difference over the tokens of both."""
        tokens = self.tokens + other.tokens
        share = other.tokens / tokens
        variance = (1 - share) * (self.std**2 + share * (self.mean - other.mean) ** 2) + share * other.std**2
        return LogprobDiff((1 - share) * self.mean + share * other.mean, math.sqrt(variance), tokens)

    def __str__(self) -> str:
        return f"{self.mean:.4g} ± {self.std / math.sqrt(self.tokens):.1g} nats per token ({self.tokens} tokens)"


def perturb(weights: Weights, seed: int, noise: float = _NOISE) -> dict[str, np.ndarray]:
    """Adds Gaussian noise to every weight, the same numbers again and again.

    Args:
        noise: standard deviation, as a share of the tensor's root mean square; all-zero tensors get 0.15.
    """
    random = np.random.default_rng(seed)
    numbers = random.standard_normal(_NOISE_LENGTH, dtype=np.float32)

    def perturb_array(array: np.ndarray) -> np.ndarray:
        std = noise * float(np.sqrt(np.mean(np.square(array))))
        repeated = np.resize(np.roll(numbers, random.integers(_NOISE_LENGTH)), array.shape)
        return array + np.float32(std or _ZERO_NOISE) * repeated

    return {name: perturb_array(array) for name, array in weights.items()}


class SyncCheck:
    """Checks that engines use the learner's weights."""

    def __init__(self, settings: Settings, task: Task, runners: Runners, learners: Learners) -> None:
        """Checks every LLM on one runner if `check_weight_sync` is set; all runners have the same code and versions."""
        self.settings, self.task, self.runners, self.learners = settings, task, runners, learners
        self._checked_learned = False
        """Whether an engine has been checked with trained weights."""
        policy_ids = settings.policy_ids if settings.check_weight_sync else ()
        self._starts = {policy_id: self._probe(policy_id) for policy_id in policy_ids}
        """Policy id → the difference at start, or without that check in the first comparison."""

    @property
    def state(self) -> dict[str, tuple[float, float, int]]:
        """Policy id → the difference at start; a resumed run must have the same limits."""
        return {policy_id: (start.mean, start.std, start.tokens) for policy_id, start in self._starts.items()}

    def load(self, state: Mapping[str, tuple[float, float, int]]) -> None:
        """Restores the state. A larger difference, measured after a resume on another device, stays."""
        for policy_id, values in state.items():
            start = LogprobDiff(*values)
            self._starts[policy_id] = max(start, self._starts.get(policy_id, start))

    def check_update(self, rows: Mapping[str, ScoredRows], rollout: Rollout, update: int) -> None:
        """Checks an update's scored responses if sampler and learner should have the same weights.

        Args:
            update: its index from 0, which is the version of the learner's weights.
        """
        if rollout.counters["version"] == update:
            for policy_id, policy_rows in rows.items():
                self.check_rows(policy_id, policy_rows)

    def check_training(self, metrics: Mapping[str, dict[str, float]], rollout: Rollout, update: int) -> None:
        """`check_update` for policies that did not score their responses, by the first mini-batch of their training.

        Args:
            metrics: policy id → training metrics; those that are not reported are removed.
        """
        for policy_id, values in metrics.items():
            diff = LogprobDiff(
                values["logprob_diff_mean"], values.pop("logprob_diff_std"), int(values.pop("logprob_diff_tokens"))
            )
            if rollout.counters["version"] == update and diff.tokens:
                self._check(policy_id, diff)

    def check_rows(self, policy_id: str, rows: ScoredRows) -> None:
        """Checks rows that were sampled and scored with the same weights.

        Skips frozen models, which no learner has, and rows with non-finite log-probabilities of the learner, for which
        the update raises `NonFiniteUpdate`.
        """
        if policy_id not in self.settings.frozen_models and rows.logprobs.isfinite().all():
            self._check(policy_id, LogprobDiff.measure(rows, rows.logprobs))

    def _check(self, policy_id: str, diff: LogprobDiff) -> None:
        check_diff(policy_id, diff, self._starts.get(policy_id), self._dtype(policy_id), self.settings)
        self._starts.setdefault(policy_id, diff)

    def check_trained_weights(self) -> None:
        """Checks the first trained weights with `max_lag`, when no update's responses are sampled with them."""
        if self.settings.max_lag and not self._checked_learned:
            for policy_id in self.settings.policy_ids:
                prompts = self._prompts(policy_id)
                rows = _make_rows(prompts, self._generate(policy_id, prompts))
                scores = self.learners.score({policy_id: rows}, reference=False)[policy_id]
                self.check_rows(policy_id, rows.with_scores(scores))
            self._checked_learned = True

    def _probe(self, policy_id: str) -> LogprobDiff:
        prompts = self._prompts(policy_id)
        length = self.settings.prompt_limit
        prompts.append([token for prompt in prompts * length for token in prompt][:length])

        def score(weights: Weights, rows: Rows) -> torch.Tensor:
            return self.learners.score_under(policy_id, weights, rows).logprobs

        load, generate = partial(self.runners.load_on_one_runner, policy_id), partial(self._generate, policy_id)
        tolerance = _TOLERANCE[self._dtype(policy_id)]
        return check_weight_sync(self.learners.weights(policy_id), prompts, load, generate, score, policy_id, tolerance)

    def _prompts(self, policy_id: str) -> list[list[int]]:
        chain = self.settings.make_chain(self.task, self.settings.make_tokenizers(), (policy_id,))
        return [chain.encoders[0].build_prompt(query).tokens for query in chain.task.train[:_NUM_QUERIES]]

    def _generate(self, policy_id: str, prompts: Sequence[Sequence[int]]) -> list[Response]:
        responses: list[Response] = self.runners.call_one(
            "probe", policy_id=policy_id, prompts=prompts, seeds=range(len(prompts))
        )
        return responses

    def _dtype(self, policy_id: str) -> torch.dtype:
        """Returns the compute type of an LLM's learner."""
        return self.learners.call_policy(policy_id, lambda policy: policy.model.dtype)


def min_limit(dtype: torch.dtype, settings: Settings) -> float:
    """Returns the lowest limit of mean |sampler - learner| log-probability, in nats per token."""
    tf32 = dtype == torch.float32 and settings.backend == "vllm" and settings.gpus_per_runner > 0
    return _MIN_LIMIT_TF32 if tf32 else _MIN_LIMIT[dtype]


def max_mean_diff(tokens: int, start: LogprobDiff | None, lowest: float) -> float:
    """Returns the limit of mean |sampler - learner| log-probability, in nats per token, if `max_logprob_diff` is null.

    It is 3 times the mean at start plus 3 standard errors, from `lowest` to 10 times `lowest`. The standard error is
    that of the difference between the mean of these tokens and the start's. It follows from the spread at start: the
    wide spread of an engine with other weights would excuse itself.

    Args:
        start: measured at start; None: not measured, the highest limit applies.
    """
    if start is None:
        return _LIMIT_RANGE * lowest
    standard_error = start.std * math.sqrt(1 / start.tokens + 1 / tokens)
    return min(max(_GROWTH * (start.mean + _STANDARD_ERRORS * standard_error), lowest), _LIMIT_RANGE * lowest)


def check_diff(
    policy_id: str, diff: LogprobDiff, start: LogprobDiff | None, dtype: torch.dtype, settings: Settings
) -> None:
    """Compares a difference between sampler and learner with its limit: `max_logprob_diff` or `max_mean_diff`."""
    lowest = min_limit(dtype, settings)
    limit = settings.max_logprob_diff or max_mean_diff(diff.tokens, start, lowest)
    if diff.mean <= limit:  # False for NaN
        return
    rule = f"at start it was {start}" if start else "it was not measured at start"
    if settings.max_logprob_diff is None:
        rule += f"; the limit is {_GROWTH} times that, from {lowest:g} to {_LIMIT_RANGE * lowest:g}"
    advice = (
        "The generation engine probably does not use the current weights: use another backend and report this."
        if dtype == torch.float32
        else "Either both round differently, or the generation engine does not use the current weights. Run with "
        "dtype=fp32 to find out: if that run fails too, use another backend and report this."
    )
    raise WeightSyncError(
        f"Sampler and learner of {policy_id} differ: mean |sampler - learner| log-probability is {diff} > {limit:.4g} "
        f"({rule}). {advice} If it is rounding, raise max_logprob_diff."
    )


def check_weight_sync(
    weights: Weights,
    prompts: Sequence[Sequence[int]],
    load: Callable[[Weights], None],
    generate: Callable[[Sequence[Sequence[int]]], list[Response]],
    score: Callable[[Weights, Rows], torch.Tensor],
    policy_id: str,
    tolerance: float = _TOLERANCE[torch.float32],
) -> LogprobDiff:
    """Perturbs and restores an LLM's weights in the engine; compares log-probabilities with the learner's each time.

    Args:
        prompts: token ids; include one of the maximum length, to test cached prompt blocks too.
        generate: samples one response per prompt from the engine, with the same seeds in each call.
        score: returns the learner's log-probabilities `[B, R]` of rows under the passed weights.
        tolerance: allowed deviation as a share of the perturbation's effect, besides twice the rounding difference.

    Returns:
        The difference by rounding: with the initial and with the perturbed weights in both.
    """
    perturbed_weights = perturb(weights, seed=0)

    def diff(rows: Rows, learner_weights: Weights) -> LogprobDiff:
        return LogprobDiff.measure(rows, score(learner_weights, rows))

    initial_rows = _make_rows(prompts, generate(prompts))
    before = diff(initial_rows, weights)
    load(perturbed_weights)
    try:
        perturbed_rows = _make_rows(prompts, generate(prompts))
    finally:
        load(weights)
    restored_rows = _make_rows(prompts, generate(prompts))
    perturbed, after = diff(perturbed_rows, perturbed_weights), diff(restored_rows, weights)
    moved = diff(perturbed_rows, weights)  # as if the engine had kept the initial weights
    limit = 2 * before.mean + tolerance * moved.mean
    is_synced = perturbed.mean <= limit and after.mean <= limit and moved.mean >= 10 * before.mean
    if not is_synced:  # True for NaN too
        raise WeightSyncCheckError(
            f"The generation engine of {policy_id} does not use new weights: mean |sampler - learner| log-probability "
            f"is {before.mean:.2g} initially, {perturbed.mean:.2g} after new weights (limit {limit:.2g}; "
            f"{moved.mean:.2g} with the old ones) and {after.mean:.2g} after restoring the old ones. Use another "
            "backend, and report this with the model and the versions of vLLM, transformers and torch."
        )
    return before.merge(perturbed)


def _make_rows(prompts: Sequence[Sequence[int]], responses: Sequence[Response]) -> Rows:
    zeros = [0.0] * len(prompts)
    tokens = [response.tokens for response in responses]
    return make_rows(prompts, tokens, [response.logprobs for response in responses], zeros, [False] * len(prompts))
