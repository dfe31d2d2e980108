from launch.display.rows import Rows
from launch.run_folder.records import Figures, Update
from policies.settings.settings import Settings

FIGURES: Figures = {"task_reward": -12.345, "kl": 123.45, "combined_reward": -99.99}


def line(agents: int) -> Update:
    settings = Settings(num_agents=agents)
    return {
        "update": 99,
        "roles": dict(zip(settings.roles, settings.policy_ids, strict=True)),
        "policy": dict.fromkeys(settings.policy_ids, FIGURES),
        "seconds": {"total": 123.4},
        "tokens_per_second": 12345.6,
    }


def test_two_agents_fit_a_terminal_of_80_columns() -> None:
    rows = Rows(Settings(num_agents=2, num_updates=100), "→", width=80)
    assert [len(row) for row in [*rows.heading(), rows.update(line(2))] if len(row) > 80] == []
    assert rows.update(line(2)).plain.split() == [
        *("99/100", "llm_1→llm_2", "-12.35", "123.45", "-99.99", "-12.35", "123.45", "-99.99", "12346", "123.4")
    ]


def test_heading_and_rows_line_up() -> None:
    rows = Rows(Settings(num_agents=2, num_updates=100), "→")
    assert len(rows.heading()[1]) == len(rows.update(line(2)))


def test_policies_that_do_not_fit_are_shown_as_their_mean() -> None:
    rows = Rows(Settings(num_agents=8), ">", width=80)
    shown = [*rows.heading(), rows.update(line(8))]
    assert [len(each) for each in shown[1:]] == [60, 60] and shown[0].plain.split() == ["mean"]
    assert shown[2].plain.split()[1:5] == ["1>2>3>4>5>6>7>8", "-12.35", "123.45", "-99.99"]


def test_what_is_not_finite_is_a_dash() -> None:
    update = line(1)
    update["policy"]["llm_1"] = {**FIGURES, "kl": None}
    assert Rows(Settings(num_agents=1), "→").update(update).plain.split()[3] == "-"


def test_an_evaluation_has_rows_of_the_policies_of_the_last_answer_and_of_the_mean_llm() -> None:
    evaluation = {**dict.fromkeys(("llm_1", "llm_2"), FIGURES), "llm_mean": {**FIGURES, "kl": None}}
    rows = Rows(Settings(), "→").evaluation({"update": 6, "evaluation": evaluation, "last_response": FIGURES})
    assert [row.plain.split()[1:] for row in rows] == [
        ["held-out", *["-12.35", "123.45", "-99.99"] * 2],
        ["last", "answer", "-12.35", "123.45", "-99.99"],
        ["llm_mean", "-12.35", "-", "-99.99"],
    ]
