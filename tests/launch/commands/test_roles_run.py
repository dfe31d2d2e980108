"""A run with roles from end to end: train, resume, evaluate, generate and export."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from policies.models.model_names import model_path
from tests.launch.conftest import ENVIRONMENT, Cory

TEAM = """\
task: drafts
model: drafts-llama-tiny
reward: tests.policies.sample_rewards:letters
feedback: tests.cory_env.sample_rewards:too_short # never solved: responses have at most 6 characters
stop_when: solved
roles:
  - {name: solver, count: 2, policy: llm_1}
  - {name: critic, prompt: "{query}~{solver.response}=", produces_response: false, max_response_tokens: 3,
     policy: llm_2}
  - {name: reviser, prompt: "{query}~{solver.response}~{critic.response}=", repeat: 2, policy: llm_1}
exchange_period: null
average_period: null
credit: chain
advantage: rloo
num_generations: 2
queries_per_update: 4
minibatch_size: 8
num_epochs: 1
max_prompt_tokens: 48
max_response_tokens: 6
num_updates: 1
eval_every: 1
eval_queries: 4
test_queries: 4
num_runners: 0
backend: transformers
dtype: fp32
check_weight_sync: false
"""
AGENTS = ["solver_1", "solver_2", "critic", "reviser_1", "reviser_2"]


@pytest.fixture(scope="module")
def team_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with roles, and of its output."""
    folder = tmp_path_factory.mktemp("team")
    (folder / "team.yaml").write_text(TEAM)
    command = [sys.executable, "-m", "cory_rllib", "train", "team.yaml", "--out", "run"]
    trained = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    assert trained.returncode == 0, trained.stderr
    (folder / "output").write_text(trained.stdout)
    return folder / "run"


@pytest.mark.slow
def test_a_run_names_roles_in_its_output_and_files(team_run: Path) -> None:
    output = (team_run.parent / "output").read_text()
    assert "5 agents (solver_1 → solver_2 → critic → reviser_1 → reviser_2)" in output and "1→1→2→1→1" in output
    lines = [json.loads(line) for line in (team_run / "metrics.jsonl").read_text().splitlines()]
    assert list(lines[-1]["role"]) == AGENTS and lines[-1]["role"]["critic"]["task_reward"] is None
    final = json.loads((team_run / "final.json").read_text())
    assert [*final["last_response"]] == ["llm_1,llm_1,llm_2,llm_1,llm_1"]


@pytest.mark.slow
def test_roles_cannot_change_when_a_run_resumes(team_run: Path, cory_forked: Cory) -> None:
    changed = cory_forked("train", "--resume", str(team_run), "roles=[{name: solver}, {name: reviser}]", "num_agents=2")
    assert changed.returncode == 2 and "roles=" in changed.stderr and "cannot change when it resumes" in changed.stderr


@pytest.mark.slow
def test_evaluations_name_roles(team_run: Path, cory: Cory) -> None:
    evaluated = cory("evaluate", str(team_run), "--queries", "4", "--samples", "1")
    assert evaluated.returncode == 0, evaluated.stderr
    (file,) = (team_run / "evaluation").glob("*/evaluation.json")
    rows = json.loads(file.read_text())["rows"]
    assert {"llm_1", "llm_2 as critic", "llm_1 as reviser_1"} <= rows.keys()
    assert rows["llm_2 as critic"]["figures"]["response_length"]["mean"] <= 3
    agents = cory("evaluate", str(team_run), "--agents", "1")
    assert agents.returncode == 2 and "--agents conflicts with the roles of" in agents.stderr


@pytest.mark.slow
def test_all_roles_generate_with_and_without_feedback(team_run: Path, cory_forked: Cory) -> None:
    answered = cory_forked("generate", str(team_run), "12+34+5")
    assert answered.returncode == 0 and "reviser_2 (llm_1): " in answered.stdout, answered.stderr
    assert answered.stdout.count("feedback: ") == 3  # not on the critic's text, nor on the last response
    every = cory_forked("generate", str(team_run), "12+34+5", "--no-feedback", "--json")
    assert [response["role"] for response in json.loads(every.stdout)["responses"]] == AGENTS


@pytest.mark.slow
def test_the_model_card_names_roles(team_run: Path, cory_forked: Cory, tmp_path: Path) -> None:
    exported = cory_forked("export", str(team_run), "--policy", "llm_2", "--out", "export")
    assert exported.returncode == 0, exported.stderr
    card = (tmp_path / "export" / "README.md").read_text()
    assert "a chain of 5 agents (solver_1, solver_2, critic, reviser_1, reviser_2) with 2 LLMs" in card
    assert "As critic:\n```\n{query}~{solver.response}=\n```" in card


def test_validate_and_plan_know_roles(cory_in_process: Cory, tmp_path: Path) -> None:
    (tmp_path / "team.yaml").write_text(TEAM)
    validated = cory_in_process("validate", "team.yaml")
    assert validated.returncode == 0, validated.stderr
    assert all(f"Prompt of {agent}, " in validated.stdout for agent in AGENTS)
    assert "critic: " not in validated.stdout and "reviser_2: " in validated.stdout  # rewards
    planned = cory_in_process("plan", "team.yaml")
    assert planned.returncode == 0 and "It fits" in planned.stdout, planned.stderr


@pytest.mark.slow
def test_a_frozen_model_has_a_role_everywhere(cory: Cory, tmp_path: Path) -> None:
    shutil.copytree(model_path("drafts-llama-tiny"), tmp_path / "critic-model")
    (tmp_path / "team.yaml").write_text(TEAM.replace("policy: llm_2", "policy: critic-model"))
    planned = cory("plan", "team.yaml")
    assert planned.returncode == 0 and "\ncritic-model: 0.3 M parameters" in planned.stdout, planned.stderr
    trained = cory("train", "team.yaml", "--out", "run")
    assert trained.returncode == 0 and "critic     frozen_1" in trained.stdout, trained.stderr
    (tmp_path / "elsewhere").mkdir()
    run = str(tmp_path / "run")
    command = [sys.executable, "-m", "cory_rllib", "train", "--resume", run, "num_updates=2"]
    resumed = subprocess.run(command, cwd=tmp_path / "elsewhere", env=ENVIRONMENT, capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stderr
    evaluated = cory("evaluate", run, "--queries", "4", "--samples", "1")
    assert evaluated.returncode == 0 and "llm_1 then llm_1 then frozen_1 then llm_1" in evaluated.stdout
    answered = cory("generate", run, "12+34+5")
    assert answered.returncode == 0 and "critic (frozen_1): " in answered.stdout, answered.stderr
    refused = cory("export", run, "--policy", "frozen_1", "--out", "frozen")
    assert refused.returncode == 2 and "frozen_1 is the frozen model critic-model" in refused.stderr
    exported = cory("export", run, "--out", "export")
    assert exported.returncode == 0, exported.stderr
    card = (tmp_path / "export" / "README.md").read_text()
    assert "with 1 LLM and frozen models (critic: `critic-model`), which answer" in card
    (tmp_path / "critic-model" / "generation_config.json").write_text('{"eos_token_id": 1}')
    changed = cory("train", "--resume", run, "num_updates=3")
    assert changed.returncode == 2 and "critic-model has changed since training started" in changed.stderr
