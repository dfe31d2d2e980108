import io

from launch.display.rows import RowFormatter
from launch.display.terminal import Terminal
from launch.run_folder.records import MetricValues, Update
from tests.paper import paper_settings

FIGURES: MetricValues = {"task_reward": -12.345, "kl": 123.45, "combined_reward": -99.99}


def line(agents: int) -> Update:
    settings = paper_settings(num_agents=agents)
    return {
        "update": 99,
        "roles": dict(zip(settings.agents, settings.policy_ids, strict=True)),
        "policy": dict.fromkeys(settings.policy_ids, FIGURES),
        "seconds": {"total": 123.4},
        "tokens_per_second": 12345.6,
    }


def test_rows_of_two_agents_fit_into_80_columns() -> None:
    rows = RowFormatter(paper_settings(num_agents=2, num_updates=100), "→")
    assert [len(row) for row in [*rows.heading(), rows.update(line(2))] if len(row) > 80] == []
    assert rows.update(line(2)).plain.split() == [
        *("99/100", "llm_1→llm_2", "-12.35", "123.45", "-99.99", "-12.35", "123.45", "-99.99", "12346", "123.4")
    ]


def test_heading_and_rows_have_the_same_width() -> None:
    rows = RowFormatter(paper_settings(num_agents=2, num_updates=100), "→")
    assert len(rows.heading()[1]) == len(rows.update(line(2)))


def test_only_the_mean_is_shown_of_more_than_two_policies() -> None:
    rows = RowFormatter(paper_settings(num_agents=8), ">")
    lines = [*rows.heading(), rows.update(line(8))]
    assert [len(text) for text in lines[1:]] == [60, 60] and lines[0].plain.split() == ["average"]
    assert lines[2].plain.split()[1:5] == ["1>2>3>4>5>6>7>8", "-12.35", "123.45", "-99.99"]


def test_a_missing_value_is_a_dash() -> None:
    update = line(1)
    update["policy"]["llm_1"] = {**FIGURES, "kl": None}
    assert RowFormatter(paper_settings(num_agents=1), "→").update(update).plain.split()[3] == "-"


def test_the_kl_of_unscored_responses_is_the_estimated_one() -> None:
    update = line(1)
    update["policy"]["llm_1"] = {**FIGURES, "kl": None, "kl_k3": 4.5}
    assert RowFormatter(paper_settings(num_agents=1), "→").update(update).plain.split()[3] == "4.50"


def test_an_evaluation_has_rows_for_policies_last_response_and_average() -> None:
    evaluation = {**dict.fromkeys(("llm_1", "llm_2"), FIGURES), "llm_mean": {**FIGURES, "kl": None}}
    renamed: MetricValues = {"task_reward": -12.345, "bare_kl": 123.45, "in_chain_kl": 9.0, "combined_reward": -99.99}
    for last in (renamed, FIGURES):  # the latter is from a file of an earlier version
        rows = RowFormatter(paper_settings(), "→").evaluation(
            {"update": 6, "evaluation": evaluation, "last_response": last}
        )
        assert [row.plain.split()[1:] for row in rows] == [
            ["held-out", *["-12.35", "123.45", "-99.99"] * 2],
            ["last", "answer", "-12.35", "123.45", "-99.99"],
            ["llm_mean", "-12.35", "-", "-99.99"],
        ]


def test_averaging_is_shown_above_the_evaluation_of_the_averaged_llms_and_an_exchange_below() -> None:
    output = io.StringIO()
    evaluation = {name: {**FIGURES} for name in ("llm_1", "llm_2", "mean")}
    terminal = Terminal(paper_settings(), output, bar=False)
    terminal.update({**line(2), "averaged": True, "exchanged": True, "evaluation": evaluation})
    lines = output.getvalue().splitlines()
    assert [" ".join(text.split()[:2]) for text in lines[-3:]] == [
        "LLMs averaged",
        "99/100 held-out",
        "roles exchanged",
    ]
