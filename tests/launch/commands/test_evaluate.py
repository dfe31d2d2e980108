"""What `cory evaluate` makes of its arguments, before any model is loaded."""

from pathlib import Path

import pytest

from launch.commands.evaluate import _find_run, _settings
from launch.console.errors import CommandError
from launch.evaluation.evaluation import Lineup, Plan
from launch.main import main
from launch.models.trained import POLICIES
from launch.run_folder.run import Run
from launch.run_folder.sources import sources_of
from policies.settings.settings import Settings, SettingsError
from tests.launch.conftest import record
from tests.launch.run_folder.test_checkpoints import write

SETTINGS = Settings(
    num_agents=3,
    model="./mine",
    seed=5,
    min_response_tokens=2,
    max_response_tokens=9,
    queries_per_update=8,
    minibatch_size=8,
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of three agents on imdb, with a checkpoint."""
    made = record(tmp_path / "run", SETTINGS, updates=range(7))
    made.checkpoints.save(6, write)
    return made


def settings(*words: str, run: Run | None = None, agents: int | None = None) -> Settings:
    return _settings(str(run.path) if run else "./model", run, words, agents)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Checks that the command was refused with one sentence, and returns it."""
    assert main(["evaluate", *words]) == 2
    message = capsys.readouterr().err
    assert message.startswith("Error: ") and message.count("\n") == 1
    return message


def test_a_run_brings_its_settings_and_its_responses_may_be_as_long_as_any_in_training(run: Run) -> None:
    assert settings(run=run) == SETTINGS.model_copy(update={"min_response_tokens": None})
    assert settings("temperature=0.5", "max_response_tokens=20", run=run).max_response_tokens == 20


def test_a_model_is_evaluated_alone_with_the_default_presets_settings() -> None:
    assert (settings().model, settings().num_agents, settings().max_response_tokens) == ("./model", 1, 12)


def test_policies_may_play_a_chain_of_another_length_than_they_were_trained_in(run: Run) -> None:
    longer = settings(agents=6, run=run)
    assert (longer.num_agents, longer.policy_ids) == (6, SETTINGS.policy_ids) and len(longer.policy_ids) == 3
    alone = settings(agents=2)
    assert (alone.num_agents, alone.policy_ids) == (2, ("llm_1",))
    with pytest.raises(SettingsError, match="num_policies=3 LLMs cannot play num_agents=4 roles"):
        settings(agents=4, run=run)
    assert settings(agents=1, run=run).num_agents == 1  # three teams of one


def test_so_many_queries_at_once_as_are_asked_for_or_the_next_that_every_team_gets_as_many_of(tmp_path: Path) -> None:
    team = Run.create(tmp_path / "team")
    apart = SETTINGS.model_copy(update={"num_agents": 1, "num_policies": 8, "minibatch_size": 1})
    team.write_settings(apart, "cory train")
    assert (settings("queries_per_update=100", run=team).queries_per_update, settings(run=team).queries_per_update) == (
        104,
        8,
    )


@pytest.mark.parametrize("word", ["model=./other", "num_agents=2", "weights=full"])
def test_what_the_policies_are_cannot_be_changed(capsys: pytest.CaptureFixture[str], run: Run, word: str) -> None:
    assert f"`{word.partition('=')[0]}` cannot be set here" in refused(capsys, str(run.path), word)


def test_one_file_of_data_is_evaluated_whole_whatever_the_run_held_out(tmp_path: Path) -> None:
    own = Settings(task="custom", data="train.csv", eval_data="test.csv", reward="mine:score", prompt="Q: {query}")
    run = record(tmp_path / "run", own)
    assert (settings(run=run).data, settings(run=run).eval_data) == ("train.csv", "test.csv")
    found = settings("data=other.csv", run=run)
    assert (found.data, found.eval_data, found.prompt) == ("other.csv", "other.csv", "Q: {query}")
    assert settings("eval_data=other.csv", run=run).data == "other.csv"


def test_another_task_leaves_the_runs_data_and_prompts_behind(tmp_path: Path) -> None:
    own = Settings(task="custom", data="train.csv", reward="mine:score", temperature=0.5)
    run = record(tmp_path / "run", own)
    found = settings("task=imdb", "max_response_tokens=7", run=run)
    assert (found.task, found.data, found.reward, found.temperature) == ("imdb", None, None, 0.5)
    with pytest.raises(CommandError, match=r"How long may responses to task imdb be\? Add max_response_tokens=TOKENS"):
        settings("task=imdb", run=run)


def test_data_takes_the_place_of_queries_that_a_task_draws(tmp_path: Path) -> None:
    run = record(tmp_path / "run", Settings(task="arithmetic", digits=1, operations="sums"))
    found = settings("data=other.jsonl", run=run)
    assert (found.data, found.digits, found.operations) == ("other.jsonl", None, None)


def test_any_number_of_queries_may_be_played_at_once(run: Run) -> None:
    assert settings("queries_per_update=5", run=run).queries_per_update == 5


def test_an_adapter_is_evaluated_by_its_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").touch()
    assert "is an adapter. Evaluate the run" in refused(capsys, str(tmp_path))


def test_an_evaluation_is_another_one_when_its_reward_was_corrected_but_not_when_it_is_learned_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reward = tmp_path / "mine.py"
    reward.write_text("def score(completions):\n    return [0.0 for _ in completions]\n")
    chosen = Settings(reward="mine:score", num_agents=1)
    first = plan(chosen, trained=False).fingerprint
    assert plan(chosen.model_copy(update={"micro_batch_size": 1, "num_updates": 7}), trained=False).fingerprint == first
    assert plan(chosen.model_copy(update={"temperature": 0.5}), trained=False).fingerprint != first
    reward.write_text("def score(completions):\n    return [1.0 for _ in completions]\n")
    assert plan(chosen, trained=False).fingerprint != first


def test_a_target_is_a_run_a_model_or_refused(run: Run, tmp_path: Path) -> None:
    found = _find_run(str(run.path))
    assert found is not None and found.settings() == SETTINGS
    (tmp_path / "config.json").touch()
    assert [_find_run(target) for target in (str(tmp_path), "imdb-gpt2-tiny", "openai-community/gpt2")] == [None] * 3
    for target in (str(run.path / "checkpoints"), str(tmp_path / "nothing"), "./nothing"):
        with pytest.raises(CommandError, match="neither a run nor a model"):
            _find_run(target)


def test_a_checkpoint_that_is_missing_or_damaged_is_refused(capsys: pytest.CaptureFixture[str], run: Run) -> None:
    assert "no checkpoint `7`. It has: latest (6), 6." in refused(capsys, str(run.path), "--checkpoint", "7")
    weights = f"{POLICIES}/llm_1/weights"
    run.checkpoints.save(7, lambda folder: write_weights(folder / weights))
    assert run.checkpoints.choose("7", POLICIES)[0] == 7
    (run.path / "checkpoints" / "update_000007" / weights).write_text("torn")
    assert f"update_000007 has a damaged file {weights}" in refused(capsys, str(run.path))


def write_weights(file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.write_text("whole")


def plan(chosen: Settings, trained: bool = True) -> Plan:
    checkpoint = (6, Path("update_000006")) if trained else None
    task = chosen.make_task()
    sources = sources_of(chosen, task, chosen.make_tokenizers())
    return Plan(chosen, task, sources, "test", queries=5, samples=3, checkpoint=checkpoint)


ORDERS = [("llm_1", "llm_2", "llm_3"), ("llm_2", "llm_3", "llm_1"), ("llm_3", "llm_1", "llm_2")]


def test_every_policy_plays_every_role_once() -> None:
    bundled = SETTINGS.model_copy(update={"model": Settings().model})
    assert plan(bundled).lineups == [
        Lineup(False, ("llm_1", "llm_2", "llm_3"), ("base",) * 3),
        *(Lineup(True, order, order) for order in ORDERS),
    ]
    silent = bundled.model_copy(update={"knowledge_transfer": False, "num_agents": 2})
    assert [lineup.policy_ids for lineup in plan(silent).lineups] == [("llm_1",), ("llm_1",), ("llm_2",)]
    alone = bundled.model_copy(update={"num_agents": 1})
    assert plan(alone, trained=False).lineups == [Lineup(False, ("llm_1",), ("base",))]


def test_bases_that_differ_play_every_order_too_once_each_and_are_called_after_the_first_llm_of_each() -> None:
    differing = SETTINGS.model_copy(update={"model": ["imdb-gpt2-tiny", "drafts-llama-tiny", "imdb-gpt2-tiny"]})
    found = plan(differing).lineups
    assert [lineup.policy_ids for lineup in found] == [*ORDERS, *ORDERS]
    one, two = "base of llm_1", "base of llm_2"
    assert [lineup.names for lineup in found if not lineup.trained] == [
        (one, two, one),
        (two, one, one),
        (one, one, two),
    ]


def test_batches_hold_every_sample_of_every_query_once_and_no_more_than_an_update() -> None:
    work = plan(SETTINGS.model_copy(update={"num_agents": 1, "model": Settings().model}), trained=False).batches()
    assert [len(prompt_refs) for _, prompt_refs in work] == [8, 7]
    assert [prompt_ref for _, prompt_refs in work for prompt_ref in prompt_refs] == [
        (q, s) for q in range(5) for s in range(3)
    ]
