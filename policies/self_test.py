"""Proof at start that new weights reach the generation engine.

Engines keep old weights silently in more than one way: a tied head packed once at load time, activations cached
under the old weights, an update that never arrives. In bf16 the gap of one small update drowns in rounding. So every
policy is perturbed strongly once, and the engine's log-probabilities must follow the learner's there and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from cory_env.tasks import Task
from policies.generation.generator import Response
from policies.learning.rows import Rows, make_rows
from policies.models.weights import Weights
from policies.rllib.learners import Learners
from policies.rollout.runners import Runners
from policies.settings.settings import Settings

_NOISE = 0.1  # of each parameter's root mean square; 0.3 takes 30 layers so far that bf16's rounding grows tenfold
_ZERO = 0.15  # for tensors that are all zeros, as an adapter's second half is at start; less drowns in bf16's rounding
_ALLOWED = {torch.float32: 0.005, torch.bfloat16: 0.05}
"""Share of the perturbation's effect that may stay unexplained, beside twice the rounding gap, by the compute type."""


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


def prove(settings: Settings, task: Task, runners: Runners, learners: Learners) -> dict[str, Probe]:
    """Tests every LLM on one runner: all run the same code on the same versions.

    Raises:
        SelfTestFailure: an engine does not follow.
    """
    tokenizers = settings.make_tokenizers()

    def test(name: str) -> Probe:
        chain = settings.make_chain(task, tokenizers, (name,))
        prompts = [chain.build_prompt(query, [])[0] for query in chain.task.train[:16]]
        longest = [token for prompt in prompts * chain.max_prompt for token in prompt][: chain.max_prompt]

        def load(weights: Weights) -> None:
            runners.load_one(name, weights)

        def generate(prompts: Sequence[Sequence[int]]) -> list[Response]:
            return runners.call_one("probe", module_id=name, prompts=prompts, seeds=range(len(prompts)))

        def score(weights: Weights, rows: Rows) -> torch.Tensor:
            return learners.score_under(name, weights, rows)["logprobs"]

        dtype = learners.ask(lambda learner: learner.policies[name].model.dtype if name in learner.policies else None)
        allowed, given = _ALLOWED[dtype], [*prompts, longest]
        return self_test(learners.weights(name), given, load, generate, score, name, allowed, settings.backend)

    return {name: test(name) for name in settings.modules}


def self_test(
    weights: Weights,
    prompts: Sequence[Sequence[int]],
    load: Callable[[Weights], None],
    generate: Callable[[Sequence[Sequence[int]]], list[Response]],
    score: Callable[[Weights, Rows], torch.Tensor],
    name: str,
    allowed_share: float = _ALLOWED[torch.float32],
    backend: str = "vllm",
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
        backend: that the engine is of, for the message.

    Raises:
        SelfTestFailure: the engine did not follow. The initial weights have been loaded back by then.
    """
    other = perturb(weights, seed=0)

    def gap(rows: Rows, under: Weights) -> float:
        difference = (rows["sampler_logprobs"] - score(under, rows)).abs() * rows["mask"]
        return float(difference.sum() / rows["mask"].sum())

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
            f"{'Use backend=transformers, or report' if backend == 'vllm' else 'Report'} this with the versions of "
            f"{backend}, torch and the model."
        )
    return found


def _rows(prompts: Sequence[Sequence[int]], responses: Sequence[Response]) -> Rows:
    zeros = [0.0] * len(prompts)
    tokens = [response.tokens for response in responses]
    return make_rows(prompts, tokens, [response.logprobs for response in responses], zeros, [False] * len(prompts))
