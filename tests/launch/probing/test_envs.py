"""`cory probe` of environments: whole episodes against starting anew after one turn with as many tokens."""

import json
import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from launch.main import main
from launch.probing.advice import advise_turns
from launch.probing.envs import (
    SampledEpisode,
    TurnResponse,
    agents_without_turns,
    collect_episodes,
    compute_agent_figures,
)
from launch.probing.team_figures import compute_team_figures, part_names
from tests.launch.conftest import Cory

ENV = "env=cory_env.text_envs.sudoku:repair?turns=2&prompts=marks"
SETTINGS = (
    "chat=false",
    "max_prompt_tokens=160",
    "max_response_tokens=40",
    "dtype=fp32",
    "backend=transformers",
    "max_turns=2",
)
OPTIONS = ("--queries", "3", "--samples", "3", "--temperatures", "1", "--out", "out")


def episode(
    query: int, *turns: tuple[str, float], kind: Literal["single", "team"] = "team", failed: bool = False
) -> SampledEpisode:
    """An episode of turns, each an agent and the score after it."""
    responses = [TurnResponse(agent=agent, text="a", length=5, score=score, ended=True) for agent, score in turns]
    returns = {agent: turns[-1][1] for agent, _ in turns}
    return SampledEpisode(
        kind=kind,
        temperature=1.0,
        query=query,
        sample=0,
        responses=responses,
        returns=returns,
        truncated=False,
        failed=failed,
    )


def simulate(queries: int, first: float, later: float) -> list[SampledEpisode]:
    """Episodes of up to three turns, solved with one probability in the first turn and another in later ones."""
    random, episodes = np.random.default_rng(0), []
    for query in range(queries):
        episodes += [episode(query, ("a", float(random.random() < first)), kind="single") for _ in range(6)]
        for _ in range(3):
            scores = [float(random.random() < chance) for chance in (first, later, later)]
            number = scores.index(1.0) + 1 if 1.0 in scores else 3
            episodes.append(episode(query, *(("a", score) for score in scores[:number])))
    return episodes


def test_turns_of_all_agents_are_parts() -> None:
    episodes = [
        *(episode(query, ("a", 0.0), ("b", 0.5), kind="single") for query in range(3)),
        episode(0, ("a", 0.0), ("b", 0.5), ("a", 1.0)),
        episode(1, ("a", 0.0), ("b", 0.0), ("a", 0.0), ("b", 0.0)),
        episode(2, ("a", 0.0), ("b", 0.5), failed=True),
    ]
    outcomes = collect_episodes(episodes, solved_at=0.5)
    assert outcomes.single.right.tolist() == [[True], [True]] and outcomes.single.length.tolist() == [[10.0], [10.0]]
    first, second = outcomes.parts
    assert (first.before.tolist(), first.after.tolist()) == ([[0.0], [0.0]], [[1.0], [0.0]])
    assert (second.before.tolist(), second.after.tolist()) == ([[1.0], [0.0]], [[1.0], [0.0]])
    assert second.tokens.tolist() == [[5.0], [10.0]] and outcomes.tokens.tolist() == [[15.0], [20.0]]
    figures = compute_agent_figures(episodes, seed=0)
    assert figures["return of a"].estimate.mean == 0.5 and figures["turns of b"].estimate.mean == 1.5
    assert figures["return of a"].tokens == 10 and figures["return of b"].tokens == 7.5


def test_agents_that_one_turn_leaves_out_are_named() -> None:
    whole = [episode(query, ("a", 0.0), ("a", 0.0), ("b", 1.0)) for query in range(2)]
    assert agents_without_turns([*whole, episode(0, ("a", 0.0), kind="single")]) == ["b"]
    assert agents_without_turns([*whole, episode(0, ("a", 0.0), ("b", 0.0), kind="single")]) == []


def test_returns_are_compared_as_the_decimals_that_they_stand_for() -> None:
    solved = [("a", 0.1), ("a", math.fsum([0.1, 0.2]))]
    episodes = [
        *(episode(query, ("a", 0.1 + 0.2 - 1e-16), kind="single") for query in range(2)),
        *(episode(query, *solved) for query in range(2)),
    ]
    outcomes = collect_episodes(episodes, solved_at=0.3)
    assert outcomes.single.right.all() and outcomes.right.all()


def test_an_episode_that_its_reset_ends_has_no_turn() -> None:
    empty: SampledEpisode = {**episode(0, ("a", 1.0)), "responses": []}
    outcomes = collect_episodes(
        [episode(0, ("a", 0.0), kind="single"), episode(1, ("a", 0.0), kind="single"), empty, {**empty, "query": 1}],
        1.0,
    )
    assert outcomes.right.all() and not outcomes.tokens.any()


@pytest.mark.parametrize(
    ("first", "later", "choice", "text"),
    [
        (0.2, 0.9, "several turns", "Train with several turns: "),
        (0.5, 0.02, "one turn", "Train with max_turns=1: "),
        (1.0, 0.5, "nothing", "No agent had a second turn: "),
    ],
)
def test_the_intervals_decide_about_turns(first: float, later: float, choice: str, text: str) -> None:
    figures = compute_team_figures(collect_episodes(simulate(100, first, later), 1.0))
    advice = advise_turns({1.0: figures})
    assert advice.choice == choice and advice.text.startswith(text)
    contributions = [figures[f"{name}: after - before"].estimate.mean for name in part_names(figures)]
    assert sum(contributions) == pytest.approx(figures["team"].estimate.mean)


def test_an_environment_is_probed(cory_forked: Cory, tmp_path: Path) -> None:
    process = cory_forked("probe", "sudoku-llama-tiny", ENV, *SETTINGS, "--solved-at", "1", *OPTIONS)
    assert process.returncode == 0, process.stderr
    assert "3 test queries × 3 episodes." in process.stdout and "starting anew**" in process.stdout
    assert "solver" in process.stdout and max(map(len, process.stdout.splitlines()[2:])) <= 80
    lines = [json.loads(line) for line in (tmp_path / "out" / "responses.jsonl").read_text().splitlines()]
    kinds = [line["kind"] for line in lines]
    assert (kinds.count("single"), kinds.count("team")) == (3 * 3, 3 * 3)
    by_sample: dict[Any, str] = {}
    for line in lines:  # a first turn is the same in both
        key = line["query"], line["sample"]
        assert by_sample.setdefault(key, line["responses"][0]["text"]) == line["responses"][0]["text"]
        assert line["returns"]["solver"] == line["responses"][-1]["score"]
        assert len(line["responses"]) <= (1 if line["kind"] == "single" else 2)
    (result,) = json.loads((tmp_path / "out" / "probe.json").read_text())["results"]
    assert result["figures"]["team"]["mean"] == pytest.approx(result["figures"]["return of solver"]["mean"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sudoku-llama-tiny"], "does not define which episodes are solved. Set --solved-at"),
        (["--endpoint", "http://h/v1", "--model", "m", "--solved-at", "1"], "--endpoint conflicts with env"),
    ],
)
def test_invalid_probes_of_environments_are_rejected(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            [
                "probe",
                *words,
                ENV,
                *(word for word in SETTINGS if words[0] != "--endpoint" or "chat" not in word),
                *OPTIONS,
            ]
        )
        == 2
    )
    assert message in capsys.readouterr().err and not Path("out").exists()
