"""`cory probe` of roles: the team against one of its agents with as many tokens, and each role's contribution."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cory_env.chain_settings import Role, make_positions
from launch.main import main
from launch.models.trained import open_trained
from launch.models.trained_chain import TrainedChain
from launch.probing.advice import advise_team
from launch.probing.figures import SingleAnswers, best_of_tokens, vote, vote_of_tokens
from launch.probing.team_figures import Part, TeamOutcomes, compute_team_figures, lacks_samples, part_names
from launch.probing.teams import RoleResponse, SampledTeam, collect_teams
from tests.launch.conftest import RUN_SETTINGS, record_test_run, write_policies
from tests.launch.probing.test_endpoint import ApiServer, complete, server
from tests.paper import make_settings

__all__ = ["server"]

ROLES = [
    Role("solver", count=2),
    Role("critic", prompt="{query} {solver.response}", produces_response=False),
    Role("reviser", prompt="{query} {critic.response}"),
]


def respond(agent: str, reward: float | None, length: int = 2) -> RoleResponse:
    return RoleResponse(agent=agent, text="a", length=length, task_reward=reward, ended=True)


def team_of(query: int, *responses: RoleResponse, failed: bool = False) -> SampledTeam:
    return SampledTeam(kind="team", temperature=1.0, query=query, sample=0, responses=[*responses], failed=failed)


def simulate(queries: int, right: float, *parts: tuple[str, float, float], samples: int = 4) -> TeamOutcomes:
    """Single answers that are right so often, and parts with the probabilities that they repair and spoil."""
    random = np.random.default_rng(0)
    single_right = random.random((queries, 8)) < right
    single = SingleAnswers(single_right, np.full((queries, 8), 10.0), single_right.astype(int), single_right)
    before, played = np.zeros((queries, samples)), []
    for name, repairs, spoils in parts:
        draw = random.random((queries, samples))
        after = np.where(before > 0, draw >= spoils, draw < repairs).astype(float)
        played.append(Part(name, before, after, np.ones_like(before), np.full_like(before, 10.0)))
        before = after
    return TeamOutcomes(single, tuple(played))


def test_responses_become_the_parts_of_a_team() -> None:
    single = [
        {"kind": "single", "temperature": 1.0, "query": query, "sample": sample, "responses": [answer], "failed": False}
        for query in range(3)
        for sample, answer in enumerate([respond("solver", 1.0), respond("solver", 0.0), respond("solver", 0.0)])
    ]
    solvers = respond("solver_1", 1.0), respond("solver_2", 0.0)
    teams = [
        team_of(0, *solvers, respond("critic", None, 5), respond("reviser", 1.0, 3)),
        team_of(1, *solvers),  # it stopped
        team_of(2, *solvers, failed=True),
    ]
    samples: Any = [*single, *teams]
    outcomes = collect_teams(samples, make_positions(ROLES), 1.0, str.strip, has_check=False)
    assert outcomes.single.right.tolist() == [[True, False, False]] * 2 and outcomes.single.accepted is None
    solver, critic, reviser = outcomes.parts
    assert solver.after.tolist() == [[0.5], [0.0]]  # the last draft is the answer of the episode that ends with it
    assert (critic.answers, critic.after.tolist(), critic.tokens.tolist()) == (False, [[0.5], [0.0]], [[5.0], [0.0]])
    assert reviser.before.tolist() == [[0.5], [0.0]] and reviser.acted.tolist() == [[1.0], [0.0]]
    assert outcomes.right.tolist() == [[1.0], [0.0]] and outcomes.tokens.tolist() == [[12.0], [4.0]]
    figures = compute_team_figures(outcomes)
    assert part_names(figures) == ["solver", "critic", "reviser"]
    assert figures["reviser: repairs"].estimate[0] == 1 and figures["reviser: spoils"].estimate[0] == 0
    assert "solver: repairs" not in figures and "critic: repairs" not in figures
    assert np.isnan(figures["critic: after - before"].estimate.mean) and figures["critic: after - before"].tokens == 2.5


def test_contributions_add_up_to_the_team() -> None:
    figures = compute_team_figures(
        simulate(200, 0.3, ("solver", 0.3, 0.0), ("reviser", 0.4, 0.1), ("editor", 0.0, 0.3))
    )
    contributions = [figures[f"{name}: after - before"].estimate.mean for name in part_names(figures)]
    assert sum(contributions) == pytest.approx(figures["team"].estimate.mean)
    assert figures["team"].tokens == pytest.approx(30) and figures["best_of_n"].tokens == pytest.approx(24, abs=6.01)
    for name, share in (("reviser: repairs", 0.4), ("reviser: spoils", 0.1), ("editor: spoils", 0.3)):
        mean, low, high, _ = figures[name].estimate
        assert low is not None and high is not None and low < share < high and low < mean < high


@pytest.mark.parametrize(
    ("parts", "has_check", "choice", "text"),
    [
        ([("solver", 0.3, 0.0), ("reviser", 0.9, 0.0)], True, "team", "Train the team: "),
        ([("solver", 0.3, 0.0), ("reviser", 0.05, 0.3)], True, "single agent", "Change or remove reviser: it spoils"),
        ([("solver", 0.3, 0.0), ("reviser", 0.9, 0.0)], False, "team", "against one answer"),
        ([("solver", 0.3, 0.0), ("reviser", 0.0, 0.9)], False, "single agent", "Train a single agent: "),
    ],
)
def test_the_intervals_decide(parts: list[Any], has_check: bool, choice: str, text: str) -> None:
    advice = advise_team({1.0: compute_team_figures(simulate(300, 0.3, *parts))}, has_check=has_check)
    assert advice.choice == choice and text in advice.text


def test_an_undecided_probe_says_how_many_queries_would_decide() -> None:
    figures = compute_team_figures(simulate(12, 0.3, ("solver", 0.3, 0.0), ("reviser", 0.15, 0.0)))
    advice = advise_team({1.0: figures}, has_check=False)
    assert advice.choice == "nothing" and "Nothing can be said at 12 queries" in advice.text
    assert "queries would decide" in advice.text


def test_a_vote_with_as_many_tokens_is_between_two_numbers_of_voters() -> None:
    outcomes = simulate(50, 0.7, ("solver", 0.7, 0.0))
    single = outcomes.single
    votes = [vote(single.answers, single.right, n) for n in (3, 4)]
    between = vote_of_tokens(single, 35.0)
    assert between is not None and votes[0] is not None and votes[1] is not None
    assert between.score == pytest.approx((votes[0] + votes[1]) / 2) and between.tokens == pytest.approx(
        np.full(50, 35.0)
    )
    most = vote_of_tokens(single, 1e9)
    assert most is not None and most.tokens == pytest.approx(np.full(50, 80.0))
    assert vote_of_tokens(single._replace(answers=np.tile(np.arange(8), (50, 1))), 30.0) is None
    assert not lacks_samples(outcomes)
    outcomes = outcomes._replace(single=single._replace(accepted=None))
    assert lacks_samples(outcomes._replace(parts=(outcomes.parts[0]._replace(tokens=np.full((50, 4), 500.0)),)))
    assert best_of_tokens(single, 1e9).score == pytest.approx(single.right.any(1).astype(float))


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Words of a probe without its model, in a folder with queries and functions."""
    monkeypatch.chdir(tmp_path)
    Path("q.jsonl").write_text("".join(json.dumps({"query": f"Film {number}"}) + "\n" for number in range(4)))
    Path("mine.py").write_text(
        "def score(completions):\n    return [float(c == 'right') for c in completions]\n"
        "def check(completions):\n    return [None if c == 'right' else 'No.' for c in completions]\n"
    )
    roles = (
        "roles=[{name: solver, count: 2}, "
        "{name: critic, prompt: 'Judge {query}: {solver.response}', produces_response: false, max_response_tokens: 3}, "
        "{name: reviser, prompt: 'Revise {query}: {critic.response}'}]"
    )
    settings = ["task=custom", "data=q.jsonl", "reward=mine:score", "max_response_tokens=6", "credit=chain"]
    return [*settings, roles, "--solved-at", "1", "--samples", "3", "--temperatures", "1", "--out", "out"]


def test_roles_are_probed_at_an_endpoint(
    server: ApiServer, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def reply(body: dict[str, Any], number: int) -> Any:
        text = body["messages"][-1]["content"]
        return complete("hint" if text.startswith("Judge") else "right" if text.startswith("Revise") else "wrong")

    server.reply = reply
    assert main(["probe", "--endpoint", server.url, "--model", "m", *words]) == 0
    prompts = {body["messages"][-1]["content"] for body in server.requests}
    assert {"Film 0", "Judge Film 0: wrong\nwrong", "Revise Film 0: hint"} <= prompts
    assert {body["max_tokens"] for body in server.requests if body["messages"][-1]["content"][0] == "J"} == {3}
    record = json.loads(Path("out/probe.json").read_text())
    (result,) = record["results"]
    figures = {name: figure["mean"] for name, figure in result["figures"].items()}
    assert (figures["one_answer"], figures["team"], figures["reviser: repairs"]) == (0, 1, 1)
    assert result["figures"]["team"]["tokens"] == 12 and record["advice"]["choice"] == "team"
    lines = [json.loads(line) for line in Path("out/responses.jsonl").read_text().splitlines()]
    assert len(lines) == 4 * (5 + 3) and [line["kind"] for line in lines].count("single") == 4 * 5
    text = capsys.readouterr().out
    assert "contribution" in text and "Train the team: 100 %" in text and max(map(len, text.splitlines()[2:])) <= 80


def test_a_check_stops_the_team_and_accepts_single_answers(server: ApiServer, words: list[str]) -> None:
    server.reply = lambda body, number: complete("right")
    assert (
        main(["probe", "--endpoint", server.url, "--model", "m", *words, "feedback=mine:check", "stop_when=solved"])
        == 0
    )
    lines = [json.loads(line) for line in Path("out/responses.jsonl").read_text().splitlines()]
    assert {len(line["responses"]) for line in lines} == {1}
    assert all(line["responses"][0]["feedback"] is None for line in lines)


def test_a_runs_team_gives_the_answers_of_cory_generate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    roles = [{"name": "solver", "count": 2}, {"name": "reviser"}]
    values = {**RUN_SETTINGS.model_dump(), "roles": roles, "num_agents": 3, "num_policies": None}
    settings = make_settings(values)
    run = record_test_run(tmp_path / "run", settings, updates=range(2))
    run.checkpoints.save(1, lambda path: write_policies(path, settings, seed=1))
    options = ("--queries", "2", "--samples", "3", "--temperatures", "0.7", "--solved-at", "1", "--out", "out")
    assert main(["probe", str(run.path), *options, "--roles", "llm_1,llm_2"]) == 2
    assert "--roles names 2 policies, but a probe requires 3" in capsys.readouterr().err
    assert main(["probe", str(run.path), *options]) == 0
    chain = TrainedChain(open_trained(run.path, "1"), open_trained(run.path, "1").policy_ids, 0.7, settings.seed)
    answers = chain.answer_all([(chain.chain.task.queries("test")[q], s) for q in range(2) for s in range(3)])
    lines = [json.loads(line) for line in Path("out/responses.jsonl").read_text().splitlines()]
    teams = [[response["text"] for response in line["responses"]] for line in lines if line["kind"] == "team"]
    assert teams == [[response["text"] for response in answer["responses"]] for answer in answers]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("roles=[{name: a}, {name: b, policy: gpt2}]", "Roles with frozen models conflict with --endpoint"),
        ("roles=[{name: critic, produces_response: false}]", "is the last one, but produces no response"),
        ("roles=[{name: a, colour: red}]", "roles: 1 validation error"),
    ],
)
def test_invalid_roles_are_rejected(
    word: str, message: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [other for other in words if not other.startswith("roles=")]
    assert main(["probe", "--endpoint", "http://h/v1", "--model", "m", *settings, word]) == 2
    assert message in " ".join(capsys.readouterr().err.split()) and not Path("out").exists()
