from pathlib import Path

import pytest

from launch.console.configuration import resolve
from launch.console.errors import CommandError
from launch.experiments.study import load, studies, to_cli_setting
from launch.experiments.study_runs import list_jobs
from policies.settings.settings import SettingsError, changed_settings

SHIPPED = {name: load(name) for name in studies()}
ARMS = [(name, arm) for name, study in SHIPPED.items() for arm in study.arms]


@pytest.mark.parametrize(("name", "arm_name"), ARMS)
def test_an_arm_trains_with_what_it_says_it_differs_in_and_with_nothing_else(name: str, arm_name: str) -> None:
    study = SHIPPED[name]
    arm = study.arms[arm_name]
    preset, *words = study.words(arm, seed=2)
    trained = resolve(preset, [], words)  # as `cory train` does
    assert trained == study.settings(arm, 2)
    if arm.against is not None:
        preset, *words = study.words(study.arms[arm.against], seed=2)
        against = resolve(preset, [], words).model_dump()
        assert {key for key, value in trained.model_dump().items() if value != against[key]} == set(arm.changes)


@pytest.mark.parametrize("name", ["imdb", "arithmetic"])
def test_ppo_and_cory_differ_in_the_number_of_agents_alone(name: str) -> None:
    study = SHIPPED[name]
    cory, ppo = (study.settings(study.arms[arm], 4) for arm in ("cory", "ppo"))
    assert changed_settings(cory, ppo) == ["num_agents"]
    assert (cory.num_agents, ppo.num_agents) == (2, 1)


@pytest.mark.parametrize("name", studies())
def test_no_arm_moves_the_goal_or_the_held_out_queries(name: str) -> None:
    study = SHIPPED[name]
    settings = [study.settings(arm, 0) for arm in study.arms.values()]
    assert len({(s.report_kl_coef, s.test_queries, s.eval_queries, s.eval_data) for s in settings}) == 1
    assert settings[0].eval_kl_coef == resolve(study.base, [], []).kl_coef


@pytest.mark.parametrize("name", ["credit", "drafts"])
def test_arms_of_credit_have_equal_responses_and_equal_optimizer_steps_of_each_llm(name: str) -> None:
    study = SHIPPED[name]
    settings = {name: study.settings(arm, 0) for name, arm in study.arms.items()}
    assert {s.responses * len(s.policy_ids) for s in settings.values()} == {256}
    assert {s.hyperparameters.steps * s.num_epochs for s in settings.values()} == {4}
    assert {len(s.policy_ids) for name, s in settings.items() if name.startswith("shared-")} == {1}
    assert all(name in settings for name in ("ppo", "rloo", "shared-own", "shared-own-rloo"))


def test_tier_1_has_five_seeds_and_the_six_arms_that_are_asked_for() -> None:
    study = SHIPPED["imdb"]
    found = [arm for arm in study.arms.values() if arm.tier == 1]
    assert [arm.name for arm in found] == ["cory", "ppo", "no-transfer", "no-exchange", "independent", "competitive"]
    assert {arm.seeds for arm in found} == {(0, 1, 2, 3, 4)}
    assert {arm.seeds for arm in study.arms.values() if arm.tier == 2} == {(0, 1, 2)}


def write(
    folder: Path, arms: str, head: str = "base: imdb-tiny-paper\nsettings: {dtype: fp32, test_queries: 9}\nseeds: 2\n"
) -> str:
    file = folder / "mine.yaml"
    file.write_text(f"{head}arms:\n  one: {{}}\n{arms}")
    return str(file)


@pytest.mark.parametrize(
    ("arms", "complaint"),
    [
        ("  two: {num_agents: 2}\n", "in num_agents, but it differs in nothing"),
        ("  two: {}\n", "in nothing, but it differs in nothing"),
        ("  two: {num_agnets: 1}\n", "`num_agnets`. Did you mean `num_agents`"),
        ("  two: {num_agents: 0}\n", "mine.yaml, arm two: Setting `num_agents`=0"),
        ("  two: {minibatch_size: 100}\n", "does not divide the 128 responses"),
        ("  two: {lora_rank: 8}\n", "mine.yaml, arm two: lora_rank=8 requires weights=lora"),
        ("  two: {seed: 3}\n", "arm two sets seed, which all arms have in common"),
        ("  two: {eval_kl_coef: 0.3}\n", "sets eval_kl_coef"),
        ("  two: {num_agents: 1, against: three}\n", "arm two: three is no arm before it"),
        ("  two: {num_agents: 1, tier: one}\n", "arms.two.tier 'one': Input should be a valid integer"),
        ("  two: {num_agents: 1, also: [two]}\n", "arm two: two is no arm before it"),
        ("  two: {num_agents: 1}\n  two: {num_agents: 3}\n", 'found duplicate key "two"'),
        ("  two: {lr: 1.0e-3, lr: 2.0e-3}\n", 'found duplicate key "lr"'),
        ("  two: {num_agents: 1, seeds: 0}\n", "arms.two.seeds 0: .* should have at least 1 item"),
        ("  Two/2: {num_agents: 1}\n", "arms.Two/2.name 'Two/2': String should match pattern"),
        ("  two: 1\n", "is no study as .*study describes it"),
        ("extra: 1\n", "extra 1: Extra inputs are not permitted"),
        ("contrasts: [{arm: one}]\n", "contrasts.0.against .*: Field required"),
        (
            "contrasts: [{arm: one, against: two, of: best}]\n",
            "contrasts.0.of 'best': Input should be 'bare'",
        ),
        ("  two: {num_agents: 1, name: three}\n", "Arm two sets `name`"),
        ("  two: {num_agents: 1, label: one}\n", "several arms with the label one"),
        ("contrasts: [{arm: one, against: two}]\n", "contrasts of two, which is none of its arms"),
    ],
)
def test_a_study_that_is_not_sound_is_refused(tmp_path: Path, arms: str, complaint: str) -> None:
    with pytest.raises((CommandError, SettingsError), match=complaint):
        load(write(tmp_path, arms))


def test_a_tier_without_seeds_and_a_file_of_another_encoding_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "  two: {num_agents: 1, tier: 2}\n", "base: imdb-tiny-paper\nseeds: {1: 2}\n")
    with pytest.raises(CommandError, match="Arm two is of tier 2, for which `seeds` has none"):
        load(file)
    Path(file).write_text("about: \xe9", encoding="latin-1")
    with pytest.raises(CommandError, match=r"mine\.yaml is not UTF-8 text"):
        load(file)


def test_the_first_arm_is_the_base_itself(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base: imdb-tiny-paper\nsettings: {dtype: fp32, test_queries: 9}\narms:\n  one: {lr: 1.0e-5}\n")
    with pytest.raises(CommandError, match=r"arm one says that it differs from the base in lr, but .* no other"):
        load(str(file))


def test_a_study_whose_dtype_would_depend_on_the_machine_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "  two: {num_agents: 1}\n", head="base: imdb-tiny-paper\n")
    with pytest.raises(CommandError, match="must say dtype and test_queries"):
        load(file)
    study = load(file, ["dtype=bf16", "test_queries=9"])
    assert {study.settings(arm, 0).dtype for arm in study.arms.values()} == {"bf16"}


def test_a_study_that_would_measure_nothing_after_training_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "  two: {num_agents: 1}\n", head="base: imdb-tiny-paper\n")
    with pytest.raises(CommandError, match="must say dtype and test_queries"):
        load(file, ["dtype=fp32"])


def test_an_arm_has_the_changes_of_the_one_it_is_held_against_too(tmp_path: Path) -> None:
    study = load(write(tmp_path, "  two: {num_agents: 1}\n  three: {against: two, lr: 1.0e-3, seeds: [7]}\n"))
    arm = study.arms["three"]
    assert (arm.changes, arm.differs, arm.seeds) == ({"lr": 1e-3}, {"num_agents": 1, "lr": 1e-3}, (7,))


def test_words_on_the_command_line_are_settings_of_all_arms(tmp_path: Path) -> None:
    study = load(write(tmp_path, "  two: {num_agents: 1}\n"), ["num_updates=3", "kl_coef=0.7"])
    found = [study.settings(arm, 0) for arm in study.arms.values()]
    assert {(s.num_updates, s.kl_coef, s.eval_kl_coef) for s in found} == {(3, 0.7, 0.7)}


@pytest.mark.parametrize(
    "value", [None, True, 3, 0.1, 1e-5, "text", "1", "1e-5", "null", "'quoted'", "a b", "x: y", "\n", "'😀\u2028"]
)
def test_a_word_is_read_back_as_the_value_it_was_made_of(value: str | int | float | bool | None) -> None:
    from launch.console.configuration import read_words

    assert read_words([to_cli_setting("model", value)]) == {"model": value}


def test_what_an_arm_needs_and_lacks_is_said_with_the_command_that_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arm = load("imdb").arms["ppo-double-model"]
    assert arm.missing is not None and "python -m recipes --double --out models" in arm.missing
    (tmp_path / "models" / "imdb-gpt2-double").mkdir(parents=True)
    assert arm.missing is None


def test_runs_are_done_by_tier_and_then_seed_by_seed(tmp_path: Path) -> None:
    study = SHIPPED["imdb"]
    arms = [study.arms[name] for name in ("ppo-eta-1", "ppo", "cory")]
    order = [(job.arm.name, job.seed) for job in list_jobs(study, tmp_path, arms, seeds=(0, 1))]
    assert order == [("cory", 0), ("ppo", 0), ("cory", 1), ("ppo", 1), ("ppo-eta-1", 0), ("ppo-eta-1", 1)]
