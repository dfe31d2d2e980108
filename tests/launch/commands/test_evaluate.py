"""How `cory evaluate` processes its arguments before models are loaded."""

from pathlib import Path

import pytest

from launch.console.configuration import parse_overrides
from launch.console.errors import CommandError
from launch.evaluation.evaluation import EvaluationPlan, Lineup
from launch.evaluation.target import find_run, target_settings
from launch.main import main
from launch.models.trained import POLICIES
from launch.run_folder.run import Run
from launch.run_folder.sources import collect_sources
from policies.settings.settings import Settings, SettingsError
from tests.launch.conftest import record_test_run
from tests.launch.run_folder.test_checkpoints import write_checkpoint
from tests.paper import paper_settings

SETTINGS = paper_settings(
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
    run = record_test_run(tmp_path / "run", SETTINGS, updates=range(7))
    run.checkpoints.save(6, write_checkpoint)
    return run


def settings(*words: str, run: Run | None = None, agents: int | None = None) -> Settings:
    return target_settings(str(run.path) if run else "./model", run, parse_overrides(words), agents)


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Checks that the command fails with one line, and returns it."""
    assert main(["evaluate", *words]) == 2
    message = capsys.readouterr().err
    assert message.startswith("Error: ") and message.count("\n") == 1
    return message


def test_a_run_keeps_its_settings_except_min_response_tokens(run: Run) -> None:
    assert settings(run=run) == SETTINGS.model_copy(update={"min_response_tokens": None})
    assert settings("temperature=0.5", "max_response_tokens=20", run=run).max_response_tokens == 20


def test_a_model_is_evaluated_with_the_defaults_and_without_an_adapter() -> None:
    values = settings()
    assert (values.model, values.num_agents, values.weights, values.max_response_tokens) == ("./model", 1, "full", 512)


def test_policies_can_be_evaluated_in_a_chain_of_another_length(run: Run) -> None:
    longer = settings(agents=6, run=run)
    assert (longer.num_agents, longer.policy_ids) == (6, SETTINGS.policy_ids) and len(longer.policy_ids) == 3
    model_chain = settings(agents=2)
    assert (model_chain.num_agents, model_chain.policy_ids) == (2, ("llm_1",))
    with pytest.raises(SettingsError, match="num_policies=3 is neither a divisor nor a multiple of num_agents=4"):
        settings(agents=4, run=run)
    assert settings(agents=1, run=run).num_agents == 1  # three teams of one


def test_queries_per_update_is_rounded_up_to_a_multiple_of_the_teams(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run")
    run.write_settings(
        SETTINGS.model_copy(update={"num_agents": 1, "num_policies": 8, "minibatch_size": 1}), "cory train"
    )
    assert settings("queries_per_update=100", run=run).queries_per_update == 104
    assert settings(run=run).queries_per_update == 8


@pytest.mark.parametrize("word", ["model=./other", "num_agents=2", "weights=full"])
def test_settings_of_policies_cannot_be_changed(capsys: pytest.CaptureFixture[str], run: Run, word: str) -> None:
    assert f"`{word.partition('=')[0]}` cannot be changed" in error_of(capsys, str(run.path), word)


def test_a_data_file_is_evaluated_completely(tmp_path: Path) -> None:
    run_settings = paper_settings(
        task="custom", data="train.csv", eval_data="test.csv", reward="mine:score", prompt="Q: {query}"
    )
    run = record_test_run(tmp_path / "run", run_settings)
    assert (settings(run=run).data, settings(run=run).eval_data) == ("train.csv", "test.csv")
    changed = settings("data=other.csv", run=run)
    assert (changed.data, changed.eval_data, changed.prompt) == ("other.csv", "other.csv", "Q: {query}")
    assert settings("eval_data=other.csv", run=run).data == "other.csv"


def test_another_task_drops_the_runs_data_and_prompts(tmp_path: Path) -> None:
    run = record_test_run(
        tmp_path / "run", paper_settings(task="custom", data="train.csv", reward="mine:score", temperature=0.5)
    )
    changed = settings("task=imdb", "max_response_tokens=7", run=run)
    assert (changed.task, changed.data, changed.reward, changed.temperature) == ("imdb", None, None, 0.5)
    with pytest.raises(CommandError, match=r"task=imdb requires max_response_tokens=TOKENS"):
        settings("task=imdb", run=run)


def test_any_queries_per_update_is_allowed(run: Run) -> None:
    assert settings("queries_per_update=5", run=run).queries_per_update == 5


def test_an_adapter_is_rejected_with_a_hint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").touch()
    assert "is an adapter. Evaluate its run" in error_of(capsys, str(tmp_path))


def test_a_target_is_a_run_or_a_model(run: Run, tmp_path: Path) -> None:
    found_run = find_run(str(run.path))
    assert found_run is not None and found_run.settings == SETTINGS
    (tmp_path / "config.json").touch()
    assert [find_run(target) for target in (str(tmp_path), "imdb-gpt2-tiny", "openai-community/gpt2")] == [None] * 3
    for target in (str(run.path / "checkpoints"), str(tmp_path / "nothing"), "./nothing"):
        with pytest.raises(CommandError, match="No run or model found"):
            find_run(target)


def test_a_missing_or_damaged_checkpoint_is_rejected(capsys: pytest.CaptureFixture[str], run: Run) -> None:
    assert "no checkpoint `7`. It has: latest (6), 6." in error_of(capsys, str(run.path), "--checkpoint", "7")
    weights = f"{POLICIES}/llm_1/weights"
    run.checkpoints.save(7, lambda folder: write_weights(folder / weights))
    assert run.checkpoints.choose("7", POLICIES)[0] == 7
    (run.path / "checkpoints" / "update_000007" / weights).write_text("torn")
    assert f"update_000007 has a damaged file {weights}" in error_of(capsys, str(run.path))


def write_weights(file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.write_text("whole")


def plan(settings: Settings, trained: bool = True) -> EvaluationPlan:
    checkpoint = (6, Path("update_000006")) if trained else None
    task = settings.make_task()
    sources = collect_sources(settings, task, settings.make_tokenizers())
    return EvaluationPlan(settings, task, sources, "test", queries=5, samples=3, checkpoint=checkpoint)


ORDERS = [("llm_1", "llm_2", "llm_3"), ("llm_2", "llm_3", "llm_1"), ("llm_3", "llm_1", "llm_2")]


def test_every_policy_is_evaluated_once_in_every_role() -> None:
    bundled = SETTINGS.model_copy(update={"model": paper_settings().model})
    assert plan(bundled).lineups == [
        Lineup(False, ("llm_1", "llm_2", "llm_3"), ("base",) * 3),
        *(Lineup(True, order, order) for order in ORDERS),
    ]
    no_transfer = bundled.model_copy(update={"knowledge_transfer": False, "num_agents": 2})
    assert [lineup.policy_ids for lineup in plan(no_transfer).lineups] == [("llm_1",), ("llm_1",), ("llm_2",)]
    single_agent = bundled.model_copy(update={"num_agents": 1})
    assert plan(single_agent, trained=False).lineups == [Lineup(False, ("llm_1",), ("base",))]


def test_different_bases_are_evaluated_in_every_order_and_named_after_their_first_policy() -> None:
    differing = SETTINGS.model_copy(update={"model": ["imdb-gpt2-tiny", "drafts-llama-tiny", "imdb-gpt2-tiny"]})
    lineups = plan(differing).lineups
    assert [lineup.policy_ids for lineup in lineups] == [*ORDERS, *ORDERS]
    one, two = "base of llm_1", "base of llm_2"
    assert [lineup.names for lineup in lineups if not lineup.trained] == [
        (one, two, one),
        (two, one, one),
        (one, one, two),
    ]


def test_batches_cover_every_sample_once_and_have_at_most_the_size_of_an_update() -> None:
    single_agent = SETTINGS.model_copy(update={"num_agents": 1, "model": paper_settings().model})
    batches = plan(single_agent, trained=False).batches()
    assert [len(prompt_refs) for prompt_refs in batches] == [8, 7]
    assert [prompt_ref for prompt_refs in batches for prompt_ref in prompt_refs] == [
        (q, s) for q in range(5) for s in range(3)
    ]
