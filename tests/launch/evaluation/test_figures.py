"""Metrics and tables of recorded responses, compared with values computed by hand."""

import io
import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from cory_env.chain_settings import role_names
from launch.evaluation.figures import PolicyScores, Scoring, compute_scores, pass_at_k, score_tables
from launch.run_folder.records import EvaluatedChain, EvaluatedResponse

SCORING = Scoring(queries=3, kl_coef=0.1, solved_at=1.0, ks=(1, 2), seed=0)


def response(policy: str, reward: float, tokens: list[int], ended: bool = False, kl: float = 2.0) -> EvaluatedResponse:
    metrics: dict[str, float | None] = {"task_reward": reward, "kl": kl, "eos_rate": float(ended)}
    metrics["response_length"] = float(len(tokens))
    return EvaluatedResponse(
        policy=policy, role="any", query=0, sample=0, prompt="", text="", tokens=tokens, metrics=metrics
    )


def chain(query: int, sample: int, *responses: EvaluatedResponse, policies: Sequence[str] = ()) -> EvaluatedChain:
    """A chain of the policies, by default of those that responded."""
    numbered = [EvaluatedResponse(**{**response, "query": query, "sample": sample}) for response in responses]
    return EvaluatedChain(
        policies=tuple(policies or [response["policy"] for response in responses]), responses=numbered
    )


def score(chains: list[EvaluatedChain], queries: int = 3, *, can_stop: bool = False) -> dict[str, PolicyScores]:
    num_agents = max(len(chain["policies"]) for chain in chains)
    return compute_scores(chains, SCORING._replace(queries=queries), role_names(num_agents), can_stop=can_stop)


def test_metrics_are_computed_per_query_and_averaged_over_queries() -> None:
    chains = [
        chain(0, 0, response("llm_1", 1.0, [5, 6, 5, 6])),
        chain(0, 1, response("llm_1", 0, [5])),
        # The reward failed on one response to query 1 and on all to query 2.
        chain(1, 1, response("llm_1", 3.0, [7, 7, 9], ended=True, kl=4.0)),
    ]
    figures = score(chains)["llm_1"]["figures"]
    expected = {
        "task_reward": (0.5 + 3.0) / 2,
        "kl": (2.0 + 4.0) / 2,
        "combined_reward": (0.5 - 0.2 + 3.0 - 0.4) / 2,
        "response_length": (2.5 + 3.0) / 2,
        "eos_rate": 0.5,
        "pass@1": (0.5 + 1.0) / 2,
        "pass@2": 1.0,
    }
    assert {name: figure.mean for name, figure in figures.items()} == pytest.approx(expected)
    assert {name: figure.n for name, figure in figures.items()} == {**dict.fromkeys(expected, 2), "pass@2": 1}


def test_rows_are_policies_alone_then_as_observers() -> None:
    chains = [
        chain(0, 0, response("base", 0, [1]), response("base", 1, [1])),
        chain(0, 0, response("llm_1", 2, [1]), response("llm_2", 3, [1])),
        chain(0, 0, response("llm_2", 4, [1]), response("llm_1", 5, [1])),
    ]
    rows = score(chains)
    assert {name: (row["after"], row["figures"]["task_reward"].mean) for name, row in rows.items()} == {
        "base": (None, 0),
        "llm_1": (None, 2),
        "llm_2": (None, 4),
        "base after base": ("base", 1),
        "llm_2 after llm_1": ("llm_1", 3),
        "llm_1 after llm_2": ("llm_2", 5),
    }
    assert list(rows)[:3] == ["base", "llm_1", "llm_2"]


def test_a_longer_chain_has_a_row_per_policy_and_role() -> None:
    policy_ids = ("llm_1", "llm_2", "llm_3")
    chains = [chain(0, 0, *(response("base", 0.5, [1]) for _ in range(3)))]
    for shift in range(3):
        order = policy_ids[shift:] + policy_ids[:shift]
        responses = [response(policy, 10 * position + shift, [1]) for position, policy in enumerate(order)]
        chains.append(chain(0, 0, *responses))
    rows = score(chains)
    assert {name: row["figures"]["task_reward"].mean for name, row in rows.items()} == {
        **{"base": 0.5, "llm_1": 0, "llm_2": 1, "llm_3": 2},
        **{"base as observer_1": 0.5, "llm_2 as observer_1": 10, "llm_3 as observer_1": 11},
        **{"llm_1 as observer_1": 12},
        **{"base as observer_2": 0.5, "llm_3 as observer_2": 20, "llm_1 as observer_2": 21},
        **{"llm_2 as observer_2": 22},
    }
    assert all(row["after"] is None for row in rows.values())
    tables = score_tables(rows)
    assert [table.columns[0].header for table in tables] == ["pioneer", "observer_1", "observer_2"]
    assert [column.header for column in tables[0].columns[1:]] == ["base", "llm_1", "llm_2", "llm_3"]


def test_bases_of_different_models_have_separate_rows() -> None:
    names = ("base of llm_1", "base of llm_2", "base of llm_1")
    chains = [chain(0, 0, *(response(name, float(len(name)), [1]) for name in names))]
    scores = score(chains)
    assert list(scores) == ["base of llm_1", "base of llm_2 as observer_1", "base of llm_1 as observer_2"]


def test_a_table_shows_every_metric_and_a_dash_for_unknown_values() -> None:
    rows = score([chain(0, 0, response("base", 0.25, [9], ended=True))])
    output = io.StringIO()
    (table,) = score_tables(rows)
    Console(file=output, width=200).print(table)
    text = output.getvalue()
    assert all(heading in text for heading in ("task reward", "KL", "combined", "pass@2"))
    assert "+0.25" in text and "1.00 [0.21, 1.00]" in text  # one query: only binary metrics have intervals
    assert math.isnan(rows["base"]["figures"]["pass@2"].mean) and " -\n" in text


def test_binary_metrics_have_wilson_intervals() -> None:
    chains = [chain(query, 0, response("base", 1.0, [1], ended=True, kl=0.0)) for query in range(20)]
    figures = score(chains, 20)["base"]["figures"]
    wilson = pytest.approx([0.8389, 1.0], abs=1e-4)
    assert {name for name, figure in figures.items() if list(figure[1:3]) == wilson} == {
        *("task_reward", "combined_reward", "eos_rate", "pass@1")
    }
    assert figures["kl"] == (0, 0, 0, 20) and figures["response_length"] == (1, 1, 1, 20)  # nats and tokens

    chains = [chain(query, 0, response("base", 1.0, [1], ended=True)) for query in range(19)]
    chains += [chain(19, sample, response("base", 1.0, [1], ended=sample == 0)) for sample in range(2)]
    figures = score(chains, 20)["base"]["figures"]
    assert figures["eos_rate"].mean == pytest.approx(0.975)
    assert figures["eos_rate"].high == 1.0  # shares are at most 1


@pytest.mark.parametrize("samples", [1, 4, 6])
def test_pass_at_k_is_the_share_of_subsets_of_k_samples_with_a_correct_one(samples: int) -> None:
    for correct in range(samples + 1):
        is_correct = [index < correct for index in range(samples)]
        for k in range(1, samples + 1):
            share = np.mean([any(subset) for subset in combinations(is_correct, k)])
            assert pass_at_k(correct, samples, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_is_accurate_for_many_samples() -> None:
    assert pass_at_k(1, 10_000, 100) == pytest.approx(0.01, rel=1e-9)
    exact = 1 - math.comb(9_000, 3_000) / math.comb(10_000, 3_000)
    assert pass_at_k(1_000, 10_000, 3_000) == pytest.approx(exact, rel=1e-12)


def test_pass_at_k_is_nan_with_fewer_samples_than_k() -> None:
    assert math.isnan(pass_at_k(2, 3, 4))


def test_stopped_chains_are_scored_by_role_and_by_their_last_answers() -> None:
    chains = [
        chain(0, 0, response("llm_1", 1, [5, 6, 7]), policies=("llm_1", "llm_2")),  # stopped
        chain(0, 1, response("llm_1", 0, [5, 6]), response("llm_2", 1, [5, 6, 7, 8])),
        chain(1, 0, response("llm_1", 0, [5]), response("llm_2", 0, [5, 6, 7, 8, 9])),
        chain(1, 1, response("llm_1", 0, [5]), response("llm_2", 1, [6])),
    ]
    scores = score(chains, can_stop=True)
    assert {label: (row["policy"], row["role"], row["after"]) for label, row in scores.items()} == {
        "llm_1": ("llm_1", "pioneer", None),
        "llm_2 after llm_1": ("llm_2", "observer", "llm_1"),
        "llm_1 then llm_2": ("llm_1,llm_2", "last answer", None),
    }
    names = ("task_reward", "response_length", "pass@1", "pass@2", "chain_tokens")
    figures: dict[str, dict[str, Any]] = {
        label: {name: (row["figures"][name].mean, row["figures"][name].n) for name in names if name in row["figures"]}
        for label, row in scores.items()
    }
    assert figures["llm_1"] == {
        "task_reward": (pytest.approx((1 / 2 + 0) / 2), 2),
        "response_length": (pytest.approx((2.5 + 1) / 2), 2),
        "pass@1": (pytest.approx(0.25), 2),
        "pass@2": (pytest.approx(0.5), 2),
    }
    assert figures["llm_2 after llm_1"] == {  # one response to query 0, two to query 1
        "task_reward": (pytest.approx((1 + 1 / 2) / 2), 2),
        "response_length": (pytest.approx((4 + 3) / 2), 2),
        "pass@1": (pytest.approx(0.75), 2),
        "pass@2": (pytest.approx(1.0), 1),
    }
    assert figures["llm_1 then llm_2"] == {
        "task_reward": (pytest.approx((1 + 1 / 2) / 2), 2),
        "response_length": (pytest.approx((3.5 + 3) / 2), 2),
        "pass@1": (pytest.approx(0.75), 2),
        "pass@2": (pytest.approx(1.0), 2),
        "chain_tokens": (pytest.approx(((3 + 6) / 2 + (6 + 2) / 2) / 2), 2),
    }
    tables = score_tables(scores)
    assert [table.columns[0].header for table in tables] == ["pioneer", "observer", "last answer"]
    assert [len(table.rows) for table in tables] == [7, 7, 8]


def test_a_chain_that_always_stops_has_no_rows_for_later_roles() -> None:
    chains = [
        chain(0, 0, response("base of llm_1", 1, [5]), policies=("base of llm_1", "base of llm_1", "base of llm_3")),
        chain(0, 0, response("base of llm_1", 0, [5, 6]), policies=("base of llm_1", "base of llm_3", "base of llm_1")),
    ]
    scores = score(chains, can_stop=True)
    assert {label: row["figures"]["task_reward"].mean for label, row in scores.items()} == {
        "base of llm_1": 0.5,
        "base of llm_1 then base of llm_1 then base of llm_3": 1.0,
        "base of llm_1 then base of llm_3 then base of llm_1": 0.0,
    }
    assert list(score([chain(0, 0, response("llm_1", 1, [5]))], can_stop=True)) == [
        "llm_1"
    ]  # without knowledge transfer


def test_the_kl_of_a_middle_role_is_in_the_chain_and_that_of_a_last_answer_on_the_bare_query() -> None:
    def with_kl(policy: str, own: float, bare: float | None) -> EvaluatedResponse:
        one = response(policy, 0.0, [5])
        names = {"kl": own, "bare_kl": bare}
        return EvaluatedResponse(**{**one, "metrics": {**one["metrics"], **names}})

    order = ("llm_1", "llm_2", "llm_3")
    chains = [
        chain(0, 0, response("llm_1", 0, [5]), with_kl("llm_2", 1.0, 5.0), policies=order),  # stopped
        chain(1, 0, response("llm_1", 0, [5]), with_kl("llm_2", 2.0, None), with_kl("llm_3", 4.0, 7.0)),
    ]
    scores = score(chains, can_stop=True)
    assert {label: row["figures"]["kl"].mean for label, row in scores.items()} == {
        "llm_1": 2.0,
        "llm_2 as observer_1": 1.5,
        "llm_3 as observer_2": 7.0,
        "llm_1 then llm_2 then llm_3": 6.0,
    }
