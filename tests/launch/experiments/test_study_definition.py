from pathlib import Path

import pytest

from launch.console.configuration import resolve_settings
from launch.console.errors import CommandError
from launch.experiments.study import bundled_studies, load_study, to_cli_setting
from launch.experiments.study_runs import list_jobs
from policies.settings.settings import SettingsError, changed_settings

BUNDLED = {name: load_study(name) for name in bundled_studies()}
ARMS = [(name, arm) for name, study in BUNDLED.items() for arm in study.arms]


@pytest.mark.parametrize(("name", "arm_name"), ARMS)
def test_an_arm_differs_from_its_reference_only_in_the_settings_it_lists(name: str, arm_name: str) -> None:
    study = BUNDLED[name]
    arm = study.arms[arm_name]
    preset, *words = study.words(arm, seed=2)
    settings = resolve_settings(preset, [], words)  # as `cory train` does
    assert settings == study.settings(arm, 2)
    if arm.against is not None:
        preset, *words = study.words(study.arms[arm.against], seed=2)
        reference = resolve_settings(preset, [], words).model_dump()
        assert {key for key, value in settings.model_dump().items() if value != reference[key]} == set(arm.changes)


@pytest.mark.parametrize("name", ["imdb", "arithmetic"])
def test_ppo_and_cory_differ_only_in_the_number_of_agents(name: str) -> None:
    study = BUNDLED[name]
    cory, ppo = (study.settings(study.arms[arm], 4) for arm in ("cory", "ppo"))
    assert changed_settings(cory, ppo) == ["num_agents"]
    assert (cory.num_agents, ppo.num_agents) == (2, 1)


@pytest.mark.parametrize("name", bundled_studies())
def test_all_arms_share_the_objective_and_the_held_out_queries(name: str) -> None:
    study = BUNDLED[name]
    settings = [study.settings(arm, 0) for arm in study.arms.values()]
    assert len({(s.report_kl_coef, s.test_queries, s.eval_queries, s.eval_data) for s in settings}) == 1
    assert settings[0].eval_kl_coef == resolve_settings(study.base, [], []).kl_coef


@pytest.mark.parametrize("name", ["credit", "drafts"])
def test_arms_of_credit_have_equal_numbers_of_responses_and_of_optimizer_steps_per_llm(name: str) -> None:
    study = BUNDLED[name]
    settings = {name: study.settings(arm, 0) for name, arm in study.arms.items()}
    assert {s.responses * len(s.policy_ids) for s in settings.values()} == {256}
    assert {s.hyperparameters.steps * s.num_epochs for s in settings.values()} == {4}
    assert {len(s.policy_ids) for name, s in settings.items() if name.startswith("shared-")} == {1}
    assert all(name in settings for name in ("ppo", "rloo", "shared-own", "shared-own-rloo"))


def test_tier_1_of_imdb_has_six_arms_with_five_seeds() -> None:
    study = BUNDLED["imdb"]
    arms = [arm for arm in study.arms.values() if arm.tier == 1]
    assert [arm.name for arm in arms] == ["cory", "ppo", "no-transfer", "no-exchange", "independent", "competitive"]
    assert {arm.seeds for arm in arms} == {(0, 1, 2, 3, 4)}
    assert {arm.seeds for arm in study.arms.values() if arm.tier == 2} == {(0, 1, 2)}


def write_study(
    folder: Path, arms: str, head: str = "base: imdb-tiny-paper\nsettings: {dtype: fp32, test_queries: 9}\nseeds: 2\n"
) -> str:
    file = folder / "mine.yaml"
    file.write_text(f"{head}arms:\n  one: {{}}\n{arms}")
    return str(file)


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        ("  two: {num_agents: 2}\n", "lists num_agents as different from one, but it differs in nothing"),
        ("  two: {}\n", "lists no settings as different from one, but it differs in nothing"),
        ("  two: {num_agnets: 1}\n", "`num_agnets`. Did you mean `num_agents`"),
        ("  two: {num_agents: 0}\n", "mine.yaml, arm two: Setting `num_agents`=0"),
        ("  two: {minibatch_size: 100}\n", "does not divide the 128 responses"),
        ("  two: {lora_rank: 8}\n", "mine.yaml, arm two: lora_rank=8 requires weights=lora"),
        ("  two: {seed: 3}\n", "arm two sets seed, which must be equal in all arms"),
        ("  two: {eval_kl_coef: 0.3}\n", "sets eval_kl_coef"),
        ("  two: {num_agents: 1, against: three}\n", "arm two: no earlier arm is called three"),
        ("  two: {num_agents: 1, tier: one}\n", "arms.two.tier 'one': Input should be a valid integer"),
        ("  two: {num_agents: 1, against: two}\n", "arm two: no earlier arm is called two"),
        ("  two: {num_agents: 1}\n  two: {num_agents: 3}\n", 'found duplicate key "two"'),
        ("  two: {lr: 1.0e-3, lr: 2.0e-3}\n", 'found duplicate key "lr"'),
        ("  two: {num_agents: 1, seeds: 0}\n", "arms.two.seeds 0: .* should have at least 1 item"),
        ("  Two/2: {num_agents: 1}\n", "arms.Two/2.name 'Two/2': String should match pattern"),
        ("  two: 1\n", "is not a valid study: .* See .*study for the format"),
        ("extra: 1\n", "extra 1: Extra inputs are not permitted"),
        ("contrasts: [{arm: one}]\n", "contrasts.0.against .*: Field required"),
        (
            "contrasts: [{arm: one, against: two, of: best}]\n",
            "contrasts.0.of 'best': Input should be 'bare'",
        ),
        ("  two: {num_agents: 1, name: three}\n", "Arm two sets `name`"),
        ("  two: {num_agents: 1, label: one}\n", "several arms with the label one"),
        ("contrasts: [{arm: one, against: two}]\n", "contrasts with unknown arms: two"),
    ],
)
def test_an_invalid_study_is_rejected(tmp_path: Path, arms: str, message: str) -> None:
    with pytest.raises((CommandError, SettingsError), match=message):
        load_study(write_study(tmp_path, arms))


def test_a_tier_without_seeds_and_a_file_with_another_encoding_are_rejected(tmp_path: Path) -> None:
    file = write_study(tmp_path, "  two: {num_agents: 1, tier: 2}\n", "base: imdb-tiny-paper\nseeds: {1: 2}\n")
    with pytest.raises(CommandError, match="Arm two has tier 2, which has no entry in `seeds`"):
        load_study(file)
    Path(file).write_text("about: \xe9", encoding="latin-1")
    with pytest.raises(CommandError, match=r"mine\.yaml is not UTF-8 text"):
        load_study(file)


def test_the_first_arm_must_equal_the_base(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base: imdb-tiny-paper\nsettings: {dtype: fp32, test_queries: 9}\narms:\n  one: {lr: 1.0e-5}\n")
    with pytest.raises(CommandError, match=r"arm one lists lr as different from the base, but .* must equal the base"):
        load_study(str(file))


def test_a_study_without_an_explicit_dtype_is_rejected(tmp_path: Path) -> None:
    file = write_study(tmp_path, "  two: {num_agents: 1}\n", head="base: imdb-tiny-paper\n")
    with pytest.raises(CommandError, match="requires dtype and test_queries"):
        load_study(file)
    study = load_study(file, ["dtype=bf16", "test_queries=9"])
    assert {study.settings(arm, 0).dtype for arm in study.arms.values()} == {"bf16"}


def test_a_study_without_test_queries_is_rejected(tmp_path: Path) -> None:
    file = write_study(tmp_path, "  two: {num_agents: 1}\n", head="base: imdb-tiny-paper\n")
    with pytest.raises(CommandError, match="requires dtype and test_queries"):
        load_study(file, ["dtype=fp32"])


def test_an_arm_inherits_the_changes_of_its_reference_arm(tmp_path: Path) -> None:
    study = load_study(
        write_study(tmp_path, "  two: {num_agents: 1}\n  three: {against: two, lr: 1.0e-3, seeds: [7]}\n")
    )
    arm = study.arms["three"]
    assert (arm.changes, arm.differs, arm.seeds) == ({"lr": 1e-3}, {"num_agents": 1, "lr": 1e-3}, (7,))


def test_settings_on_the_command_line_apply_to_all_arms(tmp_path: Path) -> None:
    study = load_study(write_study(tmp_path, "  two: {num_agents: 1}\n"), ["num_updates=3", "kl_coef=0.7"])
    arm_settings = [study.settings(arm, 0) for arm in study.arms.values()]
    assert {(s.num_updates, s.kl_coef, s.eval_kl_coef) for s in arm_settings} == {(3, 0.7, 0.7)}


@pytest.mark.parametrize(
    "value", [None, True, 3, 0.1, 1e-5, "text", "1", "1e-5", "null", "'quoted'", "a b", "x: y", "\n", "'😀\u2028"]
)
def test_a_setting_is_formatted_so_that_it_is_read_back_unchanged(value: str | int | float | bool | None) -> None:
    from launch.console.configuration import parse_overrides

    assert parse_overrides([to_cli_setting("model", value)]) == {"model": value}


def test_runs_are_ordered_by_tier_and_then_by_seed(tmp_path: Path) -> None:
    study = BUNDLED["imdb"]
    arms = [study.arms[name] for name in ("ppo-eta-1", "ppo", "cory")]
    order = [(job.arm.name, job.seed) for job in list_jobs(study, tmp_path, arms, seeds=(0, 1))]
    assert order == [("cory", 0), ("ppo", 0), ("cory", 1), ("ppo", 1), ("ppo-eta-1", 0), ("ppo-eta-1", 1)]
