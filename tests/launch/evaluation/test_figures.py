"""From recorded responses to figures and tables, by hand."""

import io
import math
from itertools import combinations

import numpy as np
import pytest
from rich.console import Console

from launch.evaluation.figures import Scoring, distinct_n, pass_at_k, score_tables, summarise
from launch.run_folder.records import Batch, Evaluation

SCORING = Scoring(queries=3, kl_coef=0.1, solved_at=1.0, ks=(1, 2), seed=0)


def response(policy: str, reward: float, tokens: list[int], ended: bool = False, kl: float = 2.0) -> Evaluation:
    metrics: dict[str, float | None] = {"task_reward": reward, "kl": kl, "eos_rate": float(ended)}
    return Evaluation(policy=policy, role="any", query=0, sample=0, prompt="", text="", tokens=tokens, metrics=metrics)


def chain(query: int, sample: int, *responses: Evaluation) -> list[Evaluation]:
    return [Evaluation(**{**response, "query": query, "sample": sample}) for response in responses]


def test_figures_are_means_over_queries_of_what_each_querys_responses_give() -> None:
    batches = [
        Batch(
            batch=0, chains=[chain(0, 0, response("llm_1", 1.0, [5, 6, 5, 6])), chain(0, 1, response("llm_1", 0, [5]))]
        ),
        # Of query 1 a reward failed, of query 2 all: they count as far as they can.
        Batch(batch=1, chains=[chain(1, 1, response("llm_1", 3.0, [7, 7, 9], ended=True, kl=4.0))]),
    ]
    figures = summarise(batches, SCORING)["llm_1"]["figures"]
    expected = {
        "task_reward": (0.5 + 3.0) / 2,
        "kl": (2.0 + 4.0) / 2,
        "combined_reward": (0.5 - 0.2 + 3.0 - 0.4) / 2,
        "response_length": (2.5 + 3.0) / 2,
        "eos_rate": 0.5,
        "distinct_1": (2 / 5 + 1 / 2) / 2,  # without the end of sequence, token 9
        "distinct_2": (2 / 3 + 1.0) / 2,
        "pass@1": (0.5 + 1.0) / 2,
        "pass@2": 1.0,
    }
    assert {name: figure.mean for name, figure in figures.items()} == pytest.approx(expected)
    assert {name: figure.n for name, figure in figures.items()} == {**dict.fromkeys(expected, 2), "pass@2": 1}


def test_a_row_for_each_policy_alone_then_for_each_as_observer() -> None:
    batches = [
        Batch(batch=0, chains=[chain(0, 0, response("base", 0, [1]), response("base", 1, [1]))]),
        Batch(batch=1, chains=[chain(0, 0, response("llm_1", 2, [1]), response("llm_2", 3, [1]))]),
        Batch(batch=2, chains=[chain(0, 0, response("llm_2", 4, [1]), response("llm_1", 5, [1]))]),
    ]
    rows = summarise(batches, SCORING)
    assert {name: (row["after"], row["figures"]["task_reward"].mean) for name, row in rows.items()} == {
        "base": (None, 0),
        "llm_1": (None, 2),
        "llm_2": (None, 4),
        "base after base": ("base", 1),
        "llm_2 after llm_1": ("llm_1", 3),
        "llm_1 after llm_2": ("llm_2", 5),
    }
    assert list(rows)[:3] == ["base", "llm_1", "llm_2"]


def test_each_policy_in_each_role_of_a_longer_chain_and_all_of_them_together() -> None:
    policy_ids = ("llm_1", "llm_2", "llm_3")
    batches = [Batch(batch=0, chains=[chain(0, 0, *(response("base", 0.5, [1]) for _ in range(3)))])]
    for turn in range(3):
        order = policy_ids[turn:] + policy_ids[:turn]
        responses = [response(policy, 10 * place + turn, [1]) for place, policy in enumerate(order)]
        batches.append(Batch(batch=1 + turn, chains=[chain(0, 0, *responses)]))
    rows = summarise(batches, SCORING)
    assert {name: row["figures"]["task_reward"].mean for name, row in rows.items()} == {
        **{"base": 0.5, "llm_1": 0, "llm_2": 1, "llm_3": 2},
        **{"base as observer_1": 0.5, "llm_2 as observer_1": 10, "llm_3 as observer_1": 11},
        **{"llm_1 as observer_1": 12},
        **{"base as observer_2": 0.5, "llm_3 as observer_2": 20, "llm_1 as observer_2": 21},
        **{"llm_2 as observer_2": 22},
    }
    assert all(row["after"] is None for row in rows.values())
    shown = score_tables(rows, SCORING.names)
    assert [table.columns[0].header for table in shown] == ["pioneer", "observer_1", "observer_2"]
    assert [column.header for column in shown[0].columns[1:]] == ["base", "llm_1", "llm_2", "llm_3"]


def test_bases_of_different_models_have_rows_of_their_own() -> None:
    policy_ids = ("base of llm_1", "base of llm_2", "base of llm_1")
    chains = [chain(0, 0, *(response(each, float(len(each)), [1]) for each in policy_ids))]
    scores = summarise([Batch(batch=0, chains=chains)], SCORING)
    assert list(scores) == ["base of llm_1", "base of llm_2 as observer_1", "base of llm_1 as observer_2"]


def test_a_table_shows_every_figure_and_a_dash_for_what_is_unknown() -> None:
    rows = summarise([Batch(batch=0, chains=[chain(0, 0, response("base", 0.25, [9], ended=True))])], SCORING)
    output = io.StringIO()
    (shown,) = score_tables(rows, SCORING.names)
    Console(file=output, width=200).print(shown)
    text = output.getvalue()
    assert all(heading in text for heading in ("task reward", "KL", "combined", "distinct-2", "pass@2"))
    assert "+0.25" in text and "1.00 [0.21, 1.00]" in text  # of one query: a reward has no interval, a yes has
    assert math.isnan(rows["base"]["figures"]["distinct_1"].mean) and " -\n" in text


def test_what_is_a_no_or_a_yes_of_each_query_has_a_proportion_s_interval() -> None:
    chains = [chain(query, 0, response("base", 1.0, [1], ended=True, kl=0.0)) for query in range(20)]
    figures = summarise([Batch(batch=0, chains=chains)], SCORING._replace(queries=20))["base"]["figures"]
    wilson = pytest.approx([0.8389, 1.0], abs=1e-4)
    assert {name for name, figure in figures.items() if list(figure[1:3]) == wilson} == {
        *("task_reward", "combined_reward", "eos_rate", "pass@1")
    }
    assert figures["kl"] == (0, 0, 0, 20) and figures["response_length"] == (1, 1, 1, 20)  # nats and tokens

    graded = [chain(query, 0, response("base", 1.0, [1, 2])) for query in range(19)]
    graded.append(chain(19, 0, response("base", 0.5, [1, 1])))
    figures = summarise([Batch(batch=0, chains=graded)], SCORING._replace(queries=20))["base"]["figures"]
    assert figures["distinct_1"].mean == pytest.approx(0.975)
    assert figures["distinct_1"].high == 1.0  # no share is above


@pytest.mark.parametrize("samples", [1, 4, 6])
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_that_hold_a_correct_one(samples: int) -> None:
    for correct in range(samples + 1):
        right = [place < correct for place in range(samples)]
        for k in range(1, samples + 1):
            share = np.mean([any(chosen) for chosen in combinations(right, k)])
            assert pass_at_k(correct, samples, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_neither_overflows_nor_loses_digits_with_many_samples() -> None:
    assert pass_at_k(1, 10_000, 100) == pytest.approx(0.01, rel=1e-9)
    exact = 1 - math.comb(9_000, 3_000) / math.comb(10_000, 3_000)
    assert pass_at_k(1_000, 10_000, 3_000) == pytest.approx(exact, rel=1e-12)


def test_pass_at_k_is_unknown_with_fewer_samples_than_k() -> None:
    assert math.isnan(pass_at_k(2, 3, 4))


def test_distinct_n_counts_over_all_responses_to_a_query() -> None:
    responses = [[1, 2, 1], [1, 2], []]
    assert distinct_n(responses, 1) == 2 / 5
    assert distinct_n(responses, 2) == 2 / 3  # 1 2, 2 1, and 1 2 again; none from one response into the next
    assert math.isnan(distinct_n(responses, 4))
