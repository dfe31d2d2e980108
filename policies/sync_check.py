"""The weight-sync check: the generation engine samples by the learner's weights, at start and while it trains.

Engines keep old weights silently in more than one way: a tied head packed once at load time, activations cached
under the old weights, an update that never arrives. In bf16 the gap of one small update drowns in rounding. So every
policy is perturbed strongly once, and the engine's log-probabilities must follow the learner's there and back. What is
sampled later is compared with the learner's log-probabilities too: an engine that stopped following differs by more
with every update.
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

_NOISE = 0.1  # of each parameter's root mean square; 0.3 takes 30 layers so far that bf16's rounding grows tenfold
_ZERO = 0.15  # for tensors that are all zeros, as an adapter's second half is at start; less drowns in bf16's rounding
_ALLOWED = {torch.float32: 0.005, torch.bfloat16: 0.05}
"""Share of the perturbation's effect that may stay unexplained, beside twice the rounding gap, by the compute type."""
_MAX_DIFF = {torch.float32: 0.001, torch.bfloat16: 0.05}
"""Largest mean |sampler - learner| log-probability, in nats per token, by compute type: several times what rounding
causes."""
_MAX_DIFF_TF32 = 0.005
"""The same for fp32 if vLLM generates on a GPU, where its attention multiplies in TF32 (up to 0.001 on an H200)."""
_PROBES = 16
"""Queries of a check that has no responses of an update's own."""


class SelfTestFailure(RuntimeError):
    """The engine's log-probabilities do not follow the learner's weights; training on them would be wrong silently."""


class Probe(NamedTuple):
    """Gaps found by the self-test of one LLM: mean |sampler - learner| log-probability per token, in nats."""

    before: float
    """Initial weights."""
    perturbed: float
    """Perturbed weights in both."""
    moved: float
    """What an engine that kept the initial weights would show."""
    after: float
    """Initial weights again."""


def perturb(weights: Weights, seed: int, noise: float = _NOISE) -> dict[str, np.ndarray]:
    """Adds Gaussian noise to every weight.

    Args:
        weights: by name.
        seed: of the noise.
        noise: its deviation, as a share of the tensor's root mean square; one that is all zeros gets 0.15.
    """
    random = np.random.default_rng(seed)

    def moved(array: np.ndarray) -> np.ndarray:
        size = noise * float(np.sqrt(np.mean(np.square(array))))
        return array + np.float32(size or _ZERO) * random.standard_normal(array.shape, dtype=np.float32)

    return {name: moved(array) for name, array in weights.items()}


class SyncCheck:
    """Checks that engines sample by the learner's weights."""

    def __init__(self, settings: Settings, task: Task, runners: Runners, learners: Learners) -> None:
        """Tests every LLM on one runner, if the settings ask for it: all run the same code on the same versions.

        Raises:
            SelfTestFailure: an engine does not follow.
        """
        self.settings, self.task, self.runners, self.learners = settings, task, runners, learners
        self._followed = False
        """Whether an engine has been seen to sample by weights that were learned."""
        self.probes = {name: self._test(name) for name in settings.policy_ids} if settings.check_weight_sync else {}
        """What the test at start found, by LLM."""

    def check_update(self, rows: Mapping[str, Rows], rollout: Rollout, update: int) -> None:
        """Checks an update's responses, if they were sampled by the weights that scored them.

        Args:
            rows: by LLM, scored.
            rollout: that they are of.
            update: its number, from 0, which is the version of the learner's weights.

        Raises:
            WeightSyncError: the engine samples by other probabilities.
        """
        if rollout.counters["version"] == update:
            for name, each in rows.items():
                self.check_rows(name, each)

    def check_learned(self) -> None:
        """Checks the first weights that were learned, if the next update's responses are not sampled by them.

        Raises:
            WeightSyncError: an engine samples by other probabilities.
        """
        if self.settings.max_lag and not self._followed:
            for name in self.settings.policy_ids:
                prompts = self._prompts(name)
                rows = _rows(prompts, self._generate(name, prompts))
                self.check_rows(name, rows | self.learners.score({name: rows})[name])
            self._followed = True

    def check_rows(self, name: str, rows: Rows) -> None:
        """Checks scored rows that were sampled by the weights that scored them.

        Not if these weights have diverged to what is not finite: the update refuses that itself (`NonFiniteUpdate`).

        Raises:
            WeightSyncError: mean |sampler - learner| log-probability, in nats a token, is beyond the limit.
        """
        if not rows["logprobs"].isfinite().all():
            return
        diff = _mean_diff(rows, rows["logprobs"])
        limit = self.settings.max_logprob_diff or default_max_diff(self._dtype(name), self.settings)
        if not diff <= limit:  # nor is NaN
            raise WeightSyncError(
                f"The generation engine of {name} does not sample by the weights that {name} learns: mean |sampler - "
                f"learner| log-probability is {diff:.2g} nats a token, and max_logprob_diff is {limit:g}. If the two "
                f"only round differently, raise max_logprob_diff; else use another backend, and report this."
            )

    def _test(self, name: str) -> Probe:
        prompts = self._prompts(name)
        longest = self.settings.max_prompt_tokens
        prompts.append([token for prompt in prompts * longest for token in prompt][:longest])

        def score(weights: Weights, rows: Rows) -> torch.Tensor:
            return self.learners.score_under(name, weights, rows)["logprobs"]

        load, generate = partial(self.runners.load_one, name), partial(self._generate, name)
        return check_weight_sync(
            self.learners.weights(name), prompts, load, generate, score, name, _ALLOWED[self._dtype(name)]
        )

    def _prompts(self, name: str) -> list[list[int]]:
        chain = self.settings.make_chain(self.task, self.settings.make_tokenizers(), (name,))
        return [chain.build_prompt(query, [])[0] for query in chain.task.train[:_PROBES]]

    def _generate(self, name: str, prompts: Sequence[Sequence[int]]) -> list[Response]:
        responses: list[Response] = self.runners.call_one(
            "probe", policy_id=name, prompts=prompts, seeds=range(len(prompts))
        )
        return responses

    def _dtype(self, name: str) -> torch.dtype:
        """What an LLM's learner computes in."""
        return self.learners.ask(
            lambda learner: learner.policies[name].model.dtype if name in learner.policies else None
        )


def default_max_diff(dtype: torch.dtype, settings: Settings) -> float:
    """Returns the limit of mean |sampler - learner| log-probability, in nats per token, if `max_logprob_diff` is null.

    Args:
        dtype: the compute type of the learner.
        settings: of the run.
    """
    tf32 = dtype == torch.float32 and settings.backend == "vllm" and settings.gpus_per_runner > 0
    return _MAX_DIFF_TF32 if tf32 else _MAX_DIFF[dtype]


def check_weight_sync(
    weights: Weights,
    prompts: Sequence[Sequence[int]],
    load: Callable[[Weights], None],
    generate: Callable[[Sequence[Sequence[int]]], list[Response]],
    score: Callable[[Weights, Rows], torch.Tensor],
    name: str,
    allowed_share: float = _ALLOWED[torch.float32],
) -> Probe:
    """Perturbs one LLM's weights in the engine and back, comparing log-probabilities with the learner's at each step.

    Args:
        weights: the present weights.
        prompts: token ids; include one as long as prompts get, so that cached prompt blocks are tested too.
        load: gives weights to the engine.
        generate: samples one response per prompt from the engine; with the same seeds each time.
        score: the learner's log-probabilities `[B, R]` of the rows under given weights.
        name: of the LLM and engine, for the message.
        allowed_share: of the perturbation's effect that may stay unexplained, beside twice the rounding gap.

    Raises:
        SelfTestFailure: the engine did not follow. The initial weights have been loaded back by then.
    """
    other = perturb(weights, seed=0)

    def gap(rows: Rows, under: Weights) -> float:
        return _mean_diff(rows, score(under, rows))

    first = _rows(prompts, generate(prompts))
    before = gap(first, weights)
    load(other)
    try:
        second = _rows(prompts, generate(prompts))
    finally:
        load(weights)
    third = _rows(prompts, generate(prompts))
    found = Probe(before, gap(second, other), gap(second, weights), gap(third, weights))
    allowed = 2 * before + allowed_share * found.moved
    follows = found.perturbed <= allowed and found.after <= allowed and found.moved >= 10 * before
    if not follows:  # nor does what is NaN
        raise SelfTestFailure(
            f"The generation engine of {name} does not follow new weights: mean |sampler - learner| log-probability is "
            f"{found.before:.2g} at start, {found.perturbed:.2g} after new weights (allowed {allowed:.2g}; "
            f"{found.moved:.2g} would mean it kept the old ones) and {found.after:.2g} after the old ones came back. "
            "Use another backend, and report this with the model and the versions of vLLM, transformers and torch."
        )
    return found


def _mean_diff(rows: Rows, logprobs: torch.Tensor) -> float:
    """Mean |sampler - learner| log-probability, in nats a token."""
    difference = (rows["sampler_logprobs"] - logprobs).abs() * rows["mask"]
    return float(difference.sum() / rows["mask"].sum())


def _rows(prompts: Sequence[Sequence[int]], responses: Sequence[Response]) -> Rows:
    zeros = [0.0] * len(prompts)
    tokens = [response.tokens for response in responses]
    return make_rows(prompts, tokens, [response.logprobs for response in responses], zeros, [False] * len(prompts))
