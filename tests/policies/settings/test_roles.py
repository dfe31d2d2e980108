"""The setting `roles`: conflicts, policies, files, and what learners get."""

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from benchmarks.roofline import example_settings
from cory_env import cory_v0
from launch.console.configuration import resolve_settings, settings_to_yaml
from policies.rollout.role_mapping import make_mapping, make_orders
from policies.settings.error import SettingsError
from policies.settings.files import read_file
from policies.settings.overrides import apply_overrides
from policies.settings.settings import Settings, changed_settings
from tests.paper import make_settings

SOLVER: dict[str, Any] = {"name": "solver", "count": 2}
CRITIC: dict[str, Any] = {"name": "critic", "prompt": "{query} {solver.response}", "produces_response": False}
REVISER: dict[str, Any] = {"name": "reviser", "prompt": "{query} {critic.response}"}
TEAM = [SOLVER, CRITIC, REVISER]
FEEDBACK = {"feedback": "tests.cory_env.sample_rewards:too_short", "stop_when": "solved"}


def settings(roles: list[dict[str, Any]] | None = None, **others: Any) -> Settings:
    return make_settings({"roles": TEAM if roles is None else roles, "backend": "transformers", **others})


def test_roles_define_agents_and_policies() -> None:
    s = settings()
    assert s.num_agents == 4 and s.agents == ("solver_1", "solver_2", "critic", "reviser")
    assert s.policy_ids == ("llm_1", "llm_2", "llm_3") and s.assignment == ("llm_1", "llm_1", "llm_2", "llm_3")
    assert settings(num_policies=1).assignment == ("llm_1",) * 4
    assert settings(num_policies=2).assignment == ("llm_1", "llm_1", "llm_2", "llm_1")
    named = settings([role | {"policy": name} for role, name in zip(TEAM, ("llm_2", "llm_1", "llm_2"), strict=True)])
    assert named.policy_ids == ("llm_1", "llm_2") and named.assignment == ("llm_2", "llm_2", "llm_1", "llm_2")
    assert settings(num_agents=2).agents == ("solver_1", "solver_2") and settings(num_agents=2).policy_ids == ("llm_1",)


def test_exchange_rotates_the_policies_over_the_roles_and_without_it_only_one_responds_first() -> None:
    s = settings(num_policies=2, exchange_period=1)
    mapping = make_mapping(s)
    assert list(mapping.as_dict().values()) == ["llm_1", "llm_1", "llm_2", "llm_1"]
    assert list(mapping.rotated().as_dict().values()) == ["llm_2", "llm_2", "llm_1", "llm_2"]
    assert mapping.rotated().rotated() == mapping and mapping.teams() == [mapping]
    assert mapping.with_pioneer("llm_2") == mapping.rotated()
    assert s.pioneers == ("llm_1", "llm_2") and settings(exchange_period=None).pioneers == ("llm_1",)


def test_frozen_models_have_policy_ids_of_their_own_and_keep_their_roles() -> None:
    frozen = [SOLVER, CRITIC | {"policy": "models/critic"}, REVISER, {"name": "judge", "policy": "models/critic"}]
    s = settings([*frozen, {"name": "last"}], num_policies=2, exchange_period=1, model=["a", "b"])
    assert s.policy_ids == ("llm_1", "llm_2") and s.frozen_models == {"frozen_1": "models/critic"}
    assert s.assignment == ("llm_1", "llm_1", "frozen_1", "llm_2", "frozen_1", "llm_1")
    assert s.all_models == {"llm_1": "a", "llm_2": "b", "frozen_1": "models/critic"}
    rotated = make_mapping(s).rotated()
    assert list(rotated.as_dict().values()) == ["llm_2", "llm_2", "frozen_1", "llm_1", "frozen_1", "llm_2"]
    assert rotated.rotated().as_dict() == make_mapping(s).as_dict()
    assert [mapping.rotation for mapping in make_orders(s)] == [0, 1] and s.responses == 3 * s.chains
    first = [SOLVER | {"policy": "m"}, {"name": "a"}, {"name": "b"}]
    assert settings(first, select_by="chain").pioneers == ()
    assert [m.rotation for m in make_orders(settings(first, select_by="chain", exchange_period=1))] == [0, 1]
    assert [m.rotation for m in make_orders(settings(first, select_by="chain", exchange_period=None))] == [0]


@pytest.mark.parametrize(
    ("roles", "others", "message"),
    [
        ([SOLVER, CRITIC], {}, "Role critic is the last one, but produces no response"),
        (TEAM, {"num_agents": 3}, "num_agents=3 ends the chain with role critic, which produces no response"),
        (TEAM, {"num_agents": 5}, "num_agents is 5, but must be from 1 to 4, the number of agents of roles"),
        (TEAM, {"num_policies": 4}, "num_policies=4 is more than the 3 roles"),
        ([SOLVER | {"policy": "llm_1"}, REVISER | {"prompt": None}], {}, "Role reviser names no policy, but others do"),
        ([SOLVER | {"policy": "llm_2"}], {}, "llm_1 has no role, but llm_2 has"),
        ([SOLVER | {"policy": "llm_1"}], {"num_policies": 2}, "num_policies=2 conflicts with roles, which name 1"),
        ([SOLVER | {"policy": "llm_1x"}], {}, "should be llm_1, llm_2, ..., or the folder or hub id"),
        ([SOLVER | {"policy": " "}], {}, "should be llm_1, llm_2, ..., or the folder"),
        ([SOLVER | {"policy": "gpt2"}], {}, "All roles have frozen models, so there is no LLM to train"),
        ([SOLVER | {"policy": "gpt2"}, {"name": "b"}], {}, "The model of role solver is frozen.*select_by=chain"),
        ([SOLVER, {"name": "b", "policy": "m"}], {"knowledge_transfer": False}, "conflicts with a frozen model"),
        ([SOLVER, {"name": "b", "policy": "m"}], {"num_policies": 2}, "more than the 1 roles without a frozen model"),
        ([SOLVER | {"policy": "llm_1"}], {"average_period": 5}, "average_period=5 requires two or more LLMs"),
        (TEAM, {"num_policies": 1, "eval_average": True}, "eval_average=true requires two or more LLMs"),
        ([SOLVER | {"count": 0}], {}, "count of role solver is 0, but must be at least 1"),
        ([SOLVER | {"color": 1}], {}, "Unexpected keyword argument"),
        ([SOLVER | {"reward": "letters"}], {}, "letters"),
        ([{"name": "a", "repeat": 2}], {}, "repeat=2 of role a requires feedback, and stop_when=solved"),
        ([SOLVER | {"max_response_tokens": 99}], {}, "max_response_tokens=99 of role solver is above the run's limit"),
        (
            [SOLVER, {"name": "b", "prompt": "{solver.feedback}"}],
            {},
            "The prompt of role b shows feedback, but the run",
        ),
        (
            [SOLVER, {"name": "b", "prompt": "{query}{feedback}"}],
            {},
            "The prompt of role b shows feedback, but the run",
        ),
        (
            TEAM,
            {"partner_reward": 0},
            "Role critic learns from no reward with partner_reward=0. Set credit=chain, or give it",
        ),
        (TEAM, {"credit": "chain", "chain_gamma": 0}, "with chain_gamma=0. Set chain_gamma above 0, or give"),
        (
            [SOLVER, {"name": "b", "reward": "none"}],
            {"select_by": "chain"},
            "select_by=chain requires a reward of role",
        ),
        ([{**CRITIC, "prompt": None}, {"name": "b"}], {}, "select_by=bare requires a reward of role critic. .*chain"),
        ([{"name": "b"}, SOLVER], {"reward_scope": "last"}, "reward_scope=last requires a last role with count=1"),
    ],
)
def test_conflicts_of_roles_are_rejected(roles: list[dict[str, Any]], others: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        settings(roles, **others)


def test_roles_may_give_the_chain_its_value_where_the_first_one_gives_no_answer() -> None:
    planner = {"name": "planner", "prompt": "Plan: {query}", "produces_response": False}
    assert settings([planner, {"name": "solver"}], select_by="chain").agents == ("planner", "solver")


def test_recorded_settings_resume_with_the_same_roles(tmp_path: Path) -> None:
    repeated = [SOLVER, CRITIC | {"max_response_tokens": 3}, REVISER | {"repeat": 2}]
    s = settings(repeated, **FEEDBACK)
    file = tmp_path / "config.yaml"
    file.write_text(settings_to_yaml(s))
    recorded = make_settings(read_file(file))
    assert recorded == s and recorded.agents[-1] == "reviser_2"
    assert YAML(typ="safe").load(file.read_text())["roles"] == repeated
    assert set(changed_settings(recorded, settings())) == {"num_agents", "feedback", "roles", "stop_when"}


def test_roles_on_the_command_line_replace_those_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "team.yaml"
    file.write_text("roles: [{name: a}, {name: b}, {name: c}]\naverage_period: null\nbackend: transformers\n")
    assert resolve_settings("imdb-tiny", [file], []).agents == ("a", "b", "c")
    assert resolve_settings("imdb-tiny", [file], ["roles=[{name: d}, {name: e}]"]).agents == ("d", "e")
    single = resolve_settings("imdb-tiny", [file], ["num_agents=1"])
    assert single.agents == ("a",) and single.policy_ids == ("llm_1",)
    one_llm = resolve_settings("imdb-tiny", [], ["roles=[{name: d, policy: llm_1}, {name: e, policy: llm_1}]"])
    assert one_llm.policy_ids == ("llm_1",) and one_llm.average_period is None
    assert apply_overrides({"num_agents": 3}, {"roles": TEAM}) == {"roles": TEAM}
    assert apply_overrides({"num_agents": 3}, {"roles": TEAM, "num_agents": 2})["num_agents"] == 2


def test_the_policy_with_the_most_responses_has_mini_batches_of_minibatch_size() -> None:
    s = settings(num_policies=2, queries_per_update=8, num_generations=2, minibatch_size=24)
    assert s.responses == 3 * 16 and s.hyperparameters.steps == 2
    with pytest.raises(SettingsError, match="minibatch_size=32 does not divide the 48 responses"):
        settings(num_policies=2, queries_per_update=8, num_generations=2, minibatch_size=32)


def test_the_example_starts_with_another_model_and_as_a_single_agent() -> None:
    words = ["model=smollm2", "backend=transformers"]
    s = example_settings("solver-critic-reviser", words)
    assert s.agents == ("solver", "critic", "reviser") and s.assignment == ("llm_1", "llm_2", "llm_1")
    assert s.responses == 128 and s.hyperparameters.steps == 2
    single = example_settings("solver-critic-reviser", [*words, "num_agents=1"])
    assert single.agents == ("solver",) and single.feedback is None and single.select_by == "bare"


def test_role_prompts_need_their_columns_in_the_data(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"query": "a"}\n' * 20)
    roles = [{"name": "a"}, {"name": "b", "prompt": "{query} {hint} {a.response}"}]
    s = settings(roles, task="custom", data=str(file), reward="tests.cory_env.sample_rewards:length")
    with pytest.raises(ValueError, match="hint"):
        s.make_task()
    file.write_text('{"query": "a", "hint": "b"}\n' * 20)
    assert s.make_task().train[0].columns["hint"] == "b"


def test_the_environment_of_a_run_has_its_roles() -> None:
    env = cory_v0.env(**settings(model="drafts-llama-tiny", task="drafts", max_prompt_tokens=40).env_settings())
    env.reset(seed=0)
    assert env.possible_agents == ["solver_1", "solver_2", "critic", "reviser"]
    env.close()
