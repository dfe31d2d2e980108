"""A run on an environment from end to end: validate, train, resume, evaluate, against another run, generate."""

import json
from pathlib import Path

import pytest

from policies.generation.installed import vllm_installed
from tests.launch.conftest import Cory
from tests.small_inputs import small_model

GAME = f"""\
env: tests.text_games:Duel?rounds=2
model: {small_model()}
weights: full
num_policies: 1
num_generations: 2
queries_per_update: 4
max_prompt_tokens: 110
max_response_tokens: 6
num_updates: 2
eval_every: 1
eval_queries: 4
num_runners: 0
backend: transformers
dtype: fp32
check_weight_sync: false
"""


@pytest.fixture
def game(tmp_path: Path) -> None:
    (tmp_path / "game.yaml").write_text(GAME)


def test_a_run_on_an_environment(cory_forked: Cory, tmp_path: Path, game: None) -> None:
    trained = cory_forked("train", "game.yaml", "num_updates=1", "--out", "run")
    assert trained.returncode == 0, trained.stderr
    assert "one LLM in all roles, learn environment tests.text_games:Duel?rounds=2" in trained.stdout
    resumed = cory_forked("train", "--resume", "run", "num_updates=2")
    assert resumed.returncode == 0, resumed.stderr
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in metrics] == [0, 1, 2]
    for line in metrics[1:]:
        assert line["role"]["first"]["task_reward"] == -line["role"]["second"]["task_reward"]
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert samples[0]["responses"][2]["observation"] == f"{samples[0]['query']}, 2 actions.\n"

    evaluated = cory_forked("evaluate", "run", "--queries", "3", "--samples", "2", "--out", "evaluation")
    assert evaluated.returncode == 0, evaluated.stderr
    rows = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())["rows"]
    assert set(rows) == {f"{name} as {agent}" for name in ("base", "llm_1") for agent in ("first", "second")}
    first, second = (rows[f"llm_1 as {agent}"]["figures"]["task_reward"] for agent in ("first", "second"))
    assert first["mean"] == -second["mean"] and first["n"] == 3

    against = cory_forked(
        "evaluate", "run", "--against", "base", "--queries", "3", "--samples", "2", "--out", "against"
    )
    assert against.returncode == 0, against.stderr
    result = json.loads((tmp_path / "against" / "against.json").read_text())
    for agent in ("first", "second"):
        figures, returns = result["figures"][agent], [value[agent] for value in result["returns"][agent]]
        assert figures["return"]["mean"] == pytest.approx(sum(returns) / 6)
        assert figures["others' return"]["mean"] == pytest.approx(-sum(returns) / 6)
        outcomes = [sum(value > 0 for value in returns) / 6, returns.count(0.0) / 6, sum(v < 0 for v in returns) / 6]
        assert [figures[name]["mean"] for name in ("win", "draw", "loss")] == pytest.approx(outcomes)
    assert "win" in against.stdout and "as second" in against.stdout
    for unused in ("temperature=0.5", "--solved-at=0"):
        refused = cory_forked("evaluate", "run", unused, "--against", "base")
        assert refused.returncode == 2 and f"so it can't use {unused.removesuffix('=0')}." in refused.stderr

    played = cory_forked("generate", "run", "7", "--json", "--samples", "2")
    assert played.returncode == 0, played.stderr
    episodes = [json.loads(line) for line in played.stdout.splitlines()]
    assert [turn["role"] for turn in episodes[0]["responses"]] == ["first", "second"] * 2
    assert sum(episodes[0]["returns"].values()) == 0 and episodes[0]["query"] == "seed 7"
    assert cory_forked("generate", "run", "a query").returncode == 2


@pytest.mark.slow
@pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")
def test_adapters_play_against_their_base_and_against_another_run(
    cory_forked: Cory, tmp_path: Path, game: None
) -> None:
    trained = cory_forked("train", "game.yaml", "weights=lora", "num_updates=1", "--out", "run")
    assert trained.returncode == 0, trained.stderr
    for opponent, label in (("base", "base"), ("run", "run (2)")):
        words = ["run", "--against", opponent, "--queries", "3", "--samples", "2", "--out", f"against {opponent}"]
        against = cory_forked("evaluate", *words)
        assert against.returncode == 0, against.stderr
        result = json.loads((tmp_path / f"against {opponent}" / "against.json").read_text())
        assert result["sides"] == ["run", label] and len(result["returns"]["second"]) == 6


def test_validate_shows_the_prompts_and_runs_pettingzoo_s_test(cory_forked: Cory, game: None) -> None:
    validated = cory_forked("validate", "game.yaml")
    assert validated.returncode == 0, validated.stderr
    assert "Environment tests.text_games:Duel?rounds=2\n  agents: first, second" in validated.stdout
    assert "Prompt of second in turn 2" in validated.stdout and "The environment is sound." in validated.stdout
    broken = cory_forked("validate", "game.yaml", "env=tests.text_games:Unseeded")
    assert broken.returncode == 2 and "fails PettingZoo's api_test" in broken.stdout


def test_each_row_of_the_data_is_an_episode(cory_forked: Cory, tmp_path: Path, game: None) -> None:
    rows = [{"query": f"{k}+1", "answer": str(k + 1)} for k in range(40)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("game.yaml", "env=tests.text_games:Problem", "data=sums.jsonl")
    validated = cory_forked("validate", *words)
    assert validated.returncode == 0, validated.stdout + validated.stderr
    assert "train: 27 rows, with seeds from 0; the first has 2 turns" in validated.stdout
    trained = cory_forked("train", *words, "num_updates=1", "--out", "run")
    assert trained.returncode == 0, trained.stderr
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        assert [turn["observation"] for turn in sample["responses"]] == [f"{sample['query']}?"] * 2
    played = cory_forked("generate", "run", "0", "--json")
    assert played.returncode == 0, played.stderr
    assert json.loads(played.stdout)["query"] == "0+1"
    refused = cory_forked("generate", "run", "99")
    assert refused.returncode == 2 and "No row of sums.jsonl has the seed 99" in refused.stderr
    rows[0]["answer"] = "2"
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changed = cory_forked("train", "--resume", "run", "num_updates=2")
    assert changed.returncode == 2 and "sums.jsonl has changed" in changed.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["env=tests.text_games:nope"], "has no function 'nope'"),
        (["env=tests.text_games:no_environment"], "not a PettingZoo AEC environment"),
        (["max_prompt_tokens=3"], "begins with a prompt of"),
        (["feedback=task"], "feedback=task requires a task instead of env"),
        (["roles=[{name: first}]"], "The roles are first, but the agents of the environment"),
    ],
)
def test_bad_environments_end_before_anything_starts(
    cory_forked: Cory, tmp_path: Path, game: None, words: list[str], message: str
) -> None:
    refused = cory_forked("train", "game.yaml", *words, "--out", "run")
    assert refused.returncode == 2 and message in refused.stderr, refused.stderr
    assert not (tmp_path / "run").exists()


def test_against_requires_runs_with_an_environment(cory_forked: Cory, tmp_path: Path, game: None) -> None:
    task = ["task=drafts", "env=null", "num_agents=1", "max_prompt_tokens=40"]
    trained = cory_forked("train", "game.yaml", *task, "num_updates=1", "--out", "run")
    assert trained.returncode == 0, trained.stderr
    refused = cory_forked("evaluate", "run", "--against", "base")
    assert (
        refused.returncode == 2 and "--against requires runs with an environment, but run has a task" in refused.stderr
    )
