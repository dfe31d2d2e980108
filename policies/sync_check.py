"""The weight-sync check: whether the generation engine uses the learner's weights, at start and during training.

Engines can silently keep old weights: a tied head packed once at load time, activations cached under the old weights,
an update that never arrives. In bf16, rounding hides the difference of one small update. So at start every policy is
perturbed strongly and restored, and the engine's log-probabilities must match the learner's each time. During training,
the log-probabilities of sampled responses are compared too: the difference of an engine with old weights grows with
every update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from cory_env.tasks import Task
from policies.generation.generator import Response
from policies.learning.rows import Rows, make_rows
from policies.models.weights import Weights
from policies.rllib.learners import Learners
from policies.rollout.episodes import Rollout
from policies.rollout.runners import Runners, WeightSyncError
from policies.settings.settings import Settings

_NOISE = 0.1  # of each tensor's root mean square; with 0.3, bf16's rounding grows tenfold over 30 layers
_ZERO_NOISE = 0.15  # for all-zero tensors, such as an adapter's second matrix at start; bf16 rounding hides less
_TOLERANCE = {torch.float32: 0.005, torch.bfloat16: 0.05}
"""Allowed deviation as a share of the perturbation's effect, besides twice the rounding difference, by compute type."""
_MAX_DIFF = {torch.float32: 0.001, torch.bfloat16: 0.05}
"""Maximum mean |sampler - learner| log-probability, in nats per token, by compute type: several times the effect of
rounding."""
_MAX_DIFF_TF32 = 0.005
"""The same for fp32 with vLLM on a GPU, whose attention multiplies in TF32 (up to 0.001 on an H200)."""
_NOISE_LENGTH = 100_003
"""Numbers of noise, which repeat: drawing one per weight would take 10 s per billion weights. A prime, so that the rows
of a matrix get different noise."""
_NUM_QUERIES = 16
"""Queries of a check without an update's responses."""


class WeightSyncCheckError(RuntimeError):
    """The engine does not use the learner's weights; training on its responses would be silently wrong."""


class SyncDiffs(NamedTuple):
    """Result of one LLM's check at start: mean |sampler - learner| log-probability per token, in nats."""

    before: float
    """With the initial weights."""
    perturbed: float
    """With perturbed weights in both."""
    moved: float
    """The value if the engine had kept the initial weights."""
    after: float
    """With the initial weights restored."""


def perturb(weights: Weights, seed: int, noise: float = _NOISE) -> dict[str, np.ndarray]:
    """Adds Gaussian noise to every weight, the same numbers again and again.

    Args:
        weights: name → array.
        seed: random seed of the noise.
        noise: standard deviation, as a share of the tensor's root mean square; all-zero tensors get 0.15.

    Returns:
        Name → perturbed array.
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
        """Checks every LLM on one runner if `check_weight_sync` is set; all runners have the same code and versions.

        Raises:
            WeightSyncCheckError: an engine does not use new weights.
        """
        self.settings, self.task, self.runners, self.learners = settings, task, runners, learners
        self._checked_learned = False
        """Whether an engine has been checked with trained weights."""
        self.initial_diffs = (
            {name: self._probe(name) for name in settings.policy_ids} if settings.check_weight_sync else {}
        )
        """Policy id → result of the check at start."""

    def check_update(self, rows: Mapping[str, Rows], rollout: Rollout, update: int) -> None:
        """Checks an update's responses if sampler and learner should have the same weights.

        Args:
            rows: policy id → scored rows.
            rollout: the update's.
            update: its index from 0, which is the version of the learner's weights.

        Raises:
            WeightSyncError: the engine uses other weights.
        """
        if rollout.counters["version"] == update:
            for policy_id, policy_rows in rows.items():
                self.check_rows(policy_id, policy_rows)

    def check_trained_weights(self) -> None:
        """Checks the first trained weights with `max_lag`, when no update's responses are sampled with them.

        Raises:
            WeightSyncError: an engine uses other weights.
        """
        if self.settings.max_lag and not self._checked_learned:
            for policy_id in self.settings.policy_ids:
                prompts = self._prompts(policy_id)
                rows = _make_rows(prompts, self._generate(policy_id, prompts))
                self.check_rows(policy_id, rows | self.learners.score({policy_id: rows}, reference=False)[policy_id])
            self._checked_learned = True

    def check_rows(self, policy_id: str, rows: Rows) -> None:
        """Checks rows that were sampled and scored with the same weights.

        Skips frozen models, which no learner has, and rows with non-finite log-probabilities of the learner, for which
        the update raises `NonFiniteUpdate`.

        Args:
            policy_id: the LLM.
            rows: scored.

        Raises:
            WeightSyncError: mean |sampler - learner| log-probability per token is above the limit.
        """
        if policy_id in self.settings.frozen_models or not rows["logprobs"].isfinite().all():
            return
        diff = _mean_diff(rows, rows["logprobs"])
        limit = self.settings.max_logprob_diff or default_max_diff(self._dtype(policy_id), self.settings)
        if not diff <= limit:  # True for NaN too
            raise WeightSyncError(
                f"The generation engine of {policy_id} does not use its current weights: mean |sampler - learner| "
                f"log-probability is {diff:.2g} nats per token, above max_logprob_diff={limit:g}. If this is only "
                "rounding, increase max_logprob_diff; otherwise use another backend and report this."
            )

    def _probe(self, policy_id: str) -> SyncDiffs:
        prompts = self._prompts(policy_id)
        length = self.settings.prompt_limit
        prompts.append([token for prompt in prompts * length for token in prompt][:length])

        def score(weights: Weights, rows: Rows) -> torch.Tensor:
            return self.learners.score_under(policy_id, weights, rows)["logprobs"]

        load, generate = partial(self.runners.load_on_one_runner, policy_id), partial(self._generate, policy_id)
        tolerance = _TOLERANCE[self._dtype(policy_id)]
        return check_weight_sync(self.learners.weights(policy_id), prompts, load, generate, score, policy_id, tolerance)

    def _prompts(self, policy_id: str) -> list[list[int]]:
        chain = self.settings.make_chain(self.task, self.settings.make_tokenizers(), (policy_id,))
        return [chain.build_prompt(query, [])[0] for query in chain.task.train[:_NUM_QUERIES]]

    def _generate(self, policy_id: str, prompts: Sequence[Sequence[int]]) -> list[Response]:
        responses: list[Response] = self.runners.call_one(
            "probe", policy_id=policy_id, prompts=prompts, seeds=range(len(prompts))
        )
        return responses

    def _dtype(self, policy_id: str) -> torch.dtype:
        """Returns the compute type of an LLM's learner."""
        return self.learners.call_first(
            lambda learner: learner.policies[policy_id].model.dtype if policy_id in learner.policies else None
        )


def default_max_diff(dtype: torch.dtype, settings: Settings) -> float:
    """Returns the limit of mean |sampler - learner| log-probability, in nats per token, if `max_logprob_diff` is null.

    Args:
        dtype: the learner's compute type.
        settings: the run's.
    """
    tf32 = dtype == torch.float32 and settings.backend == "vllm" and settings.gpus_per_runner > 0
    return _MAX_DIFF_TF32 if tf32 else _MAX_DIFF[dtype]


def check_weight_sync(
    weights: Weights,
    prompts: Sequence[Sequence[int]],
    load: Callable[[Weights], None],
    generate: Callable[[Sequence[Sequence[int]]], list[Response]],
    score: Callable[[Weights, Rows], torch.Tensor],
    policy_id: str,
    tolerance: float = _TOLERANCE[torch.float32],
) -> SyncDiffs:
    """Perturbs and restores an LLM's weights in the engine; compares log-probabilities with the learner's each time.

    Args:
        weights: the current weights.
        prompts: token ids; include one of the maximum length, to test cached prompt blocks too.
        load: loads weights into the engine.
        generate: samples one response per prompt from the engine, with the same seeds in each call.
        score: returns the learner's log-probabilities `[B, R]` of rows under the passed weights.
        policy_id: the LLM, for the message.
        tolerance: allowed deviation as a share of the perturbation's effect, besides twice the rounding difference.

    Returns:
        The measured differences.

    Raises:
        WeightSyncCheckError: the engine did not use the new weights. The initial weights are loaded again by then.
    """
    perturbed_weights = perturb(weights, seed=0)

    def diff(rows: Rows, learner_weights: Weights) -> float:
        return _mean_diff(rows, score(learner_weights, rows))

    initial_rows = _make_rows(prompts, generate(prompts))
    before = diff(initial_rows, weights)
    load(perturbed_weights)
    try:
        perturbed_rows = _make_rows(prompts, generate(prompts))
    finally:
        load(weights)
    restored_rows = _make_rows(prompts, generate(prompts))
    perturbed, moved = diff(perturbed_rows, perturbed_weights), diff(perturbed_rows, weights)
    result = SyncDiffs(before, perturbed, moved, diff(restored_rows, weights))
    limit = 2 * before + tolerance * result.moved
    is_synced = result.perturbed <= limit and result.after <= limit and result.moved >= 10 * before
    if not is_synced:  # True for NaN too
        raise WeightSyncCheckError(
            f"The generation engine of {policy_id} does not use new weights: mean |sampler - learner| log-probability "
            f"is {result.before:.2g} initially, {result.perturbed:.2g} after new weights (limit {limit:.2g}; "
            f"{result.moved:.2g} with the old ones) and {result.after:.2g} after restoring the old ones. Use another "
            "backend, and report this with the model and the versions of vLLM, transformers and torch."
        )
    return result


def _mean_diff(rows: Rows, logprobs: torch.Tensor) -> float:
    """Returns the mean |sampler - learner| log-probability, in nats per token."""
    difference = (rows["sampler_logprobs"] - logprobs).abs() * rows["mask"]
    return float(difference.sum() / rows["mask"].sum())


def _make_rows(prompts: Sequence[Sequence[int]], responses: Sequence[Response]) -> Rows:
    zeros = [0.0] * len(prompts)
    tokens = [response.tokens for response in responses]
    return make_rows(prompts, tokens, [response.logprobs for response in responses], zeros, [False] * len(prompts))
