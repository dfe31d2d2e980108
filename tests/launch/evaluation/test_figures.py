"""From recorded responses to figures and tables, by hand."""

import io

import pytest
from rich.console import Console

from launch.evaluation.figures import Scoring, summarise, tables
from launch.run_folder.records import Batch, MeasuredChain, MeasuredResponse

SCORING = Scoring(queries=3, kl_coef=0.1, solved_at=1.0, ks=(1, 2), seed=0)


def response(policy: str, reward: float, tokens: list[int], ended: bool = False, kl: float = 2.0) -> MeasuredResponse:
    return MeasuredResponse(policy=policy, role="any", text="", task_reward=reward, tokens=tokens, kl=kl, ended=ended)


def chain(query: int, sample: int, *responses: MeasuredResponse) -> MeasuredChain:
    return MeasuredChain(query=query, sample=sample, responses=list(responses))


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
    assert {name: figure["mean"] for name, figure in figures.items()} == pytest.approx(expected)
    assert {name: figure["n"] for name, figure in figures.items()} == {**dict.fromkeys(expected, 2), "pass@2": 1}
    assert (figures["kl"]["low"], figures["kl"]["high"]) == (2.0, 4.0)


def test_a_row_for_each_policy_alone_then_for_each_as_observer() -> None:
    batches = [
        Batch(batch=0, chains=[chain(0, 0, response("base", 0, [1]), response("base", 1, [1]))]),
        Batch(batch=1, chains=[chain(0, 0, response("llm_1", 2, [1]), response("llm_2", 3, [1]))]),
        Batch(batch=2, chains=[chain(0, 0, response("llm_2", 4, [1]), response("llm_1", 5, [1]))]),
    ]
    rows = summarise(batches, SCORING)
    assert {name: (row["after"], row["figures"]["task_reward"]["mean"]) for name, row in rows.items()} == {
        "base": (None, 0),
        "llm_1": (None, 2),
        "llm_2": (None, 4),
        "base after base": ("base", 1),
        "llm_2 after llm_1": ("llm_1", 3),
        "llm_1 after llm_2": ("llm_2", 5),
    }
    assert list(rows)[:3] == ["base", "llm_1", "llm_2"]


def test_each_policy_in_each_role_of_a_longer_chain_and_all_of_them_together() -> None:
    players = ("llm_1", "llm_2", "llm_3")
    batches = [Batch(batch=0, chains=[chain(0, 0, *(response("base", 0.5, [1]) for _ in range(3)))])]
    for turn in range(3):
        order = players[turn:] + players[:turn]
        responses = [response(policy, 10 * place + turn, [1]) for place, policy in enumerate(order)]
        batches.append(Batch(batch=1 + turn, chains=[chain(0, 0, *responses)]))
    known = response("llm_1", 7.0, [1])
    batches.append(Batch(batch=4, chains=[chain(1, 0, known, known)]))  # the rewards of query 1 failed but for these
    rows = summarise(batches, SCORING)
    assert {name: row["figures"]["task_reward"]["mean"] for name, row in rows.items()} == {
        **{"base": 0.5, "llm_1": (0 + 7) / 2, "llm_2": 1, "llm_3": 2},
        **{"base as observer_1": 0.5, "llm_2 as observer_1": 10, "llm_3 as observer_1": 11},
        **{"llm_1 as observer_1": (12 + 7) / 2, "all as observer_1": (11 + 7) / 2},
        **{"base as observer_2": 0.5, "llm_3 as observer_2": 20, "llm_1 as observer_2": 21},
        **{"llm_2 as observer_2": 22, "all as observer_2": 21},
    }
    assert rows["all as observer_1"]["figures"]["task_reward"]["n"] == 2
    assert all(row["after"] is None for row in rows.values())
    output = io.StringIO()
    for table in tables(rows, SCORING.names, 100):
        Console(file=output, width=200).print(table)
    labels = [line.split("  ")[0].strip() for line in output.getvalue().splitlines()]
    assert list(dict.fromkeys(label for label in labels if label in rows)) == [
        *("base", "llm_1", "llm_2", "llm_3"),
        *("base as observer_1", "all as observer_1", "base as observer_2", "all as observer_2"),
    ]


def test_tables_show_every_figure_within_the_width_and_a_dash_for_what_is_unknown() -> None:
    rows = summarise([Batch(batch=0, chains=[chain(0, 0, response("base", 0.25, [9], ended=True))])], SCORING)
    for width in range(40, 121):
        output = io.StringIO()
        for table in tables(rows, SCORING.names, width):
            Console(file=output, width=200).print(table)
        text = output.getvalue()
        assert max(map(len, text.splitlines())) <= width
        assert all(heading in text for heading in ("task reward", "KL", "combined", "distinct-2", "pass@2"))
        assert "+0.25 [+0.25, +0.25]" in text
    assert [len(tables(rows, SCORING.names, width)) for width in (200, 100, 60)] == [1, 2, 4]
    assert rows["base"]["figures"]["distinct_1"]["mean"] is None and " - " in text.replace("\n", " ")
