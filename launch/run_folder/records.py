"""What a run writes down: the lines of `metrics.jsonl` and `samples.jsonl`."""

import math
from collections.abc import Mapping, Sequence
from typing import NotRequired, TypedDict

from cory_env.message import Message
from policies.settings.settings import Settings

Figures = dict[str, float | None]
"""Named numbers; None where one is not finite or could not be computed."""


class RawResponse(TypedDict):
    """One response of a chain, before it is rewarded."""

    role: str
    policy: str
    text: str


class RawSample(TypedDict):
    """One query, as its row holds it, and the chain's answers to it, in order."""

    query: str | list[Message]
    responses: list[RawResponse]


class Response(RawResponse):
    """One response of a chain."""

    task_reward: float | None
    ended: NotRequired[bool]
    """It ends with an end-of-sequence token, which is the last of its tokens; else its length was cut."""
    repetition: NotRequired[float]
    """Share of its token pairs that stand earlier in it too."""


class Sample(TypedDict):
    """One query and the chain's responses to it, in order."""

    query: str
    responses: list[Response]


class SampleLine(Sample):
    """A line of `samples.jsonl`: a sample, the update it belongs to, and whether the query is held out."""

    update: int
    held_out: bool


class Evaluation(TypedDict):
    """One response to a held-out query, and what was measured of it: in `final.json` and in evaluations."""

    policy: str
    role: str
    query: int
    """The query's number in its split."""
    sample: int
    """Which of the responses to the query it is."""
    prompt: str
    """The query."""
    text: str
    tokens: list[int]
    metrics: Figures
    """`task_reward`; `kl` to the base, in nats, summed over the response, of a chain's last one to the base on the bare
    query; `combined_reward`; `response_length` in tokens; `eos_rate`, 1 where it ends by itself, else 0; `repetition`.
    Of a chain's last one also `in_chain_kl`: to the base in the response's own prompt."""


class Batch(TypedDict):
    """A line of an evaluation's `responses.jsonl`: some chains of one lineup, each its responses in order."""

    batch: int
    chains: list[list[Evaluation]]


class HealthWarning(TypedDict):
    """A sign of ill health that has held for `updates` updates in a row (see `policies.health`)."""

    signature: str
    subject: str
    text: str
    updates: int


class Update(TypedDict):
    """A line of `metrics.jsonl`: one update. Line 0 precedes training and holds an evaluation alone."""

    update: int
    roles: NotRequired[dict[str, str]]
    exchanged: NotRequired[bool]
    exchanges: NotRequired[int]
    averaged: NotRequired[bool]
    """After it all LLMs moved to the mean of their weights; missing from what earlier versions wrote."""
    policy: NotRequired[dict[str, Figures]]
    role: NotRequired[dict[str, Figures]]
    seconds: NotRequired[dict[str, float]]
    tokens: NotRequired[int]
    tokens_per_second: NotRequired[float]
    health: NotRequired[list[HealthWarning]]
    collapsed: NotRequired[bool]
    evaluation: NotRequired[dict[str, Figures]]
    """By policy, each alone on the bare held-out queries; with `eval_average` of `llm_mean`, the LLM whose weights
    are the mean of theirs; and the `mean` of the policies' figures."""
    last_response: NotRequired[Figures]
    """Of the chain on the same queries."""


def mean_over_policies(policies: Sequence[Figures]) -> Figures:
    """Returns the mean of each figure; None where any policy lacks it.

    A mean of the others would be of other policies here than there, so it would not compare. Over queries, updates and
    seeds a mean is of those that have a value.
    """
    means: Figures = {}
    for name in dict.fromkeys(name for figures in policies for name in figures):
        known = [value for figures in policies if (value := figures.get(name)) is not None]
        means[name] = sum(known) / len(known) if len(known) == len(policies) else None
    return means


def highest(values: Mapping[int, float | None]) -> tuple[int, float] | None:
    """Returns the update of the highest known value, and that; of equals, the first; None if none is known."""
    known = {update: value for update, value in values.items() if value is not None}
    update = max(known, key=lambda update: known[update]) if known else None
    return None if update is None else (update, known[update])


def to_json(value: object) -> object:
    """Returns `value` as strict JSON can hold it: NumPy numbers as Python's, and NaN or infinity as None."""
    if isinstance(value, dict):
        return {str(key): to_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(entry) for entry in value]
    if isinstance(value, str | bool | int | None):
        return value
    number = float(value)  # type: ignore[arg-type]
    return number if math.isfinite(number) else None


def best_of(lines: Sequence[Update], settings: Settings) -> tuple[int, float] | None:
    """Returns the update of the highest held-out combined reward, by `select_by`, and that; of equals, the earliest."""
    return highest({line["update"]: settings.selection_score(line) for line in lines if "evaluation" in line})
