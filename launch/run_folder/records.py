"""Records of runs and evaluations: the lines of `metrics.jsonl`, `samples.jsonl` and `responses.jsonl`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NotRequired, TypedDict, TypeVar

from cory_env.message import Message
from policies.settings.settings import Settings

T = TypeVar("T")
MetricValues = dict[str, float | None]
"""Metrics by name; None if a value is not finite or could not be computed."""


class GeneratedResponse(TypedDict):
    """One response of a chain, before it is rewarded.

    With `thinking`, `text` is the text after the thought, and `reasoning` the thought without its tags, if there is
    one. `feedback` is None if nothing is to be corrected, and missing if the response got no feedback. `observation` is
    what an environment showed before the response.
    """

    role: str
    policy: str
    observation: NotRequired[str]
    text: str
    reasoning: NotRequired[str]
    feedback: NotRequired[str | None]


class GeneratedSample(TypedDict):
    """One query in its original form, and the chain's responses to it, in order; in an environment its seed.

    `returns`: in an environment, the sum of each agent's rewards.
    """

    query: str | list[Message]
    responses: list[GeneratedResponse]
    returns: NotRequired[dict[str, float]]


class ScoredResponse(GeneratedResponse):
    """One response of a chain.

    `ended`: its last token is an end-of-sequence token; otherwise it was truncated. `repetition`: the fraction of its
    token pairs that occur earlier in it.
    """

    task_reward: float | None
    ended: NotRequired[bool]
    repetition: NotRequired[float]


class Sample(TypedDict):
    """One query and the chain's responses to it, in order."""

    query: str
    responses: list[ScoredResponse]


class SampleLine(Sample):
    """A line of `samples.jsonl`: a sample, its update, and whether the query is held out."""

    update: int
    held_out: bool


class EvaluatedResponse(TypedDict):
    """One response to a held-out query with its metrics, in `final.json` and in evaluations.

    `query` is the query's index in its split and `prompt` its text, `sample` the response's index among those to the
    query. `tokens` include those of the thought (`reasoning`, as in `GeneratedResponse`).

    Metrics: `task_reward`; `kl` to the base model with the response's own prompt, in nats, summed over the response;
    `combined_reward`; `response_length` in tokens; `eos_rate`, 1 if the response ends with an end-of-sequence token,
    else 0; `repetition`. For a chain's last response also `bare_kl`, to the base model with the bare query, estimated
    from the sampled tokens. In files of earlier versions, these are `in_chain_kl` and `kl`.
    """

    policy: str
    role: str
    query: int
    sample: int
    prompt: str
    text: str
    reasoning: NotRequired[str]
    tokens: list[int]
    metrics: MetricValues


class EvaluatedChain(TypedDict):
    """A line of an evaluation's `responses.jsonl`: a chain's responses in order, fewer than policies if it stopped."""

    policies: tuple[str, ...]
    """The names of the policies by position."""
    responses: list[EvaluatedResponse]


class HealthWarning(TypedDict):
    """A warning sign that has persisted for `updates` updates in a row (see `policies.health`)."""

    signature: str
    subject: str
    text: str
    updates: int


class Update(TypedDict):
    """A line of `metrics.jsonl`: one update. Line 0 is the evaluation before training, without other metrics.

    `averaged`: the weights of all policies were averaged after this update; missing in files of earlier versions.
    `evaluation`: by policy id, each policy alone on the bare held-out queries; with `eval_average` also `llm_mean`, the
    policy with the averaged weights; and `mean`, the mean over policies.
    `last_response`: the chain's last responses to the same queries. Their KL is `bare_kl` and `in_chain_kl`; in files
    of earlier versions, the former is named `kl`.
    """

    update: int
    roles: NotRequired[dict[str, str]]
    exchanged: NotRequired[bool]
    exchanges: NotRequired[int]
    averaged: NotRequired[bool]
    policy: NotRequired[dict[str, MetricValues]]
    role: NotRequired[dict[str, MetricValues]]
    seconds: NotRequired[dict[str, float]]
    tokens: NotRequired[int]
    tokens_per_second: NotRequired[float]
    health: NotRequired[list[HealthWarning]]
    collapsed: NotRequired[bool]
    evaluation: NotRequired[dict[str, MetricValues]]
    last_response: NotRequired[MetricValues]


def mean_over_policies(policies: Sequence[MetricValues]) -> MetricValues:
    """Returns the mean of each metric over policies; None if any policy lacks the metric.

    Means over different subsets of policies would not be comparable. In contrast, means over queries, updates and seeds
    ignore missing values.
    """
    means: MetricValues = {}
    for name in dict.fromkeys(name for metrics in policies for name in metrics):
        values = [value for metrics in policies if (value := metrics.get(name)) is not None]
        means[name] = sum(values) / len(values) if len(values) == len(policies) else None
    return means


def to_json(value: object) -> object:
    """Converts a value to strict JSON types: NumPy numbers to Python's, NaN and infinity to None."""
    if isinstance(value, dict):
        return {str(key): to_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(entry) for entry in value]
    if isinstance(value, str | bool | int | None):
        return value
    number = float(value)  # type: ignore[arg-type]
    return number if math.isfinite(number) else None


def with_shown_kl(metrics: Mapping[str, T]) -> dict[str, T]:
    """Returns metrics with the KL to show as `kl`: of last answers `bare_kl`, which earlier versions named `kl`.

    Of training responses that the policy did not score, it is `kl_k3`.
    """
    shown = next((name for name in ("bare_kl", "kl_k3") if name in metrics), None)
    return {**metrics} if shown is None else {**metrics, "kl": metrics[shown]}


def flatten(record: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, float | None]]:
    """Yields the numbers of a nested record as pairs such as (`policy/llm_1/kl`, 0.1); None: unknown."""
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}/")
        elif isinstance(value, int | float | None):
            yield f"{prefix}{key}", None if value is None else float(value)


def best_evaluation(lines: Sequence[Update], settings: Settings) -> tuple[int, float] | None:
    """Returns the update with the best held-out score (see `select_by`), and the score; the earliest if equal."""
    evaluations = [(line["update"], settings.selection_score(line)) for line in lines if "evaluation" in line]
    scores = [(update, score) for update, score in evaluations if score is not None]
    return max(scores, key=lambda best: best[1], default=None)
