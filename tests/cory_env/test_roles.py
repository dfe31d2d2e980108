"""Roles: positions, prompts, drafts, repeats, and rewards of their own."""

from dataclasses import replace
from math import isnan, nan
from typing import Any

import pytest
from pettingzoo.test import api_test

from cory_env import cory_v0
from cory_env.chain import Chain
from cory_env.chain_settings import ChainSettings, Role, make_positions
from cory_env.episode import ChainEpisode
from cory_env.prompt_lengths import longest_prompts, max_shown_tokens
from cory_env.rewarding.episodes import compute_awaited, reward_episodes
from cory_env.rewarding.worker import RewardWorker
from cory_env.tasks import Query, Task, make_task
from cory_env.tasks.task import TemplateError
from cory_env.tasks.turns import NO_ANSWER
from tests.cory_env.sample_tasks import LENGTH, PAPER_CHAIN, QUERIES, response, reviews, tokenizer, tokens_of, validate

REWARDS = "tests.cory_env.sample_rewards"
TOO_SHORT = f"{REWARDS}:too_short"  # None from 8 characters on
SEVEN = f"{REWARDS}:fixed?value=7"
SOLVER, CRITIC, REVISER = (
    Role("solver", count=2),
    Role("critic", "{query}|{solver.response}|{solver.feedback}", produces_response=False),
    Role("reviser", "{query}|{solver.response}|{critic.response}|{reference}|{feedback}", repeat=2),
)
TEAM = (SOLVER, CRITIC, REVISER)


def role_chain(roles: tuple[Role, ...] = TEAM, *, feedback: str | None = TOO_SHORT, **settings: Any) -> Chain:
    task = replace(reviews(), feedback=feedback, solved_feedback="fine", reference_separator="/")
    return Chain(task, tokenizer(), roles=roles, **{**PAPER_CHAIN, **settings})


def respond(episode: ChainEpisode, worker: RewardWorker, *texts: str) -> ChainEpisode:
    for text in texts:
        episode.respond(response(text))
        compute_awaited(worker, [episode])
    return episode


def prompt_of(episode: ChainEpisode) -> str:
    text = tokenizer().decode(episode.prompt_ids())
    assert isinstance(text, str)
    return text


@pytest.fixture
def worker() -> Any:
    with RewardWorker(LENGTH, feedback=TOO_SHORT, role_rewards={"critic": SEVEN}) as reward_worker:
        yield reward_worker


def test_drafts_share_a_stage_and_repeats_do_not() -> None:
    positions = make_positions(TEAM)
    assert [position.agent for position in positions] == ["solver_1", "solver_2", "critic", "reviser_1", "reviser_2"]
    assert [position.stage for position in positions] == [0, 0, 2, 3, 4]
    assert [position.role.name for position in positions] == ["solver", "solver", "critic", "reviser", "reviser"]
    assert [p.agent for p in ChainSettings(roles=TEAM, num_agents=2).make_positions()] == ["solver_1", "solver_2"]
    assert [p.agent for p in ChainSettings(num_agents=3).make_positions()] == ["pioneer", "observer_1", "observer_2"]


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ((), "roles is empty"),
        ((SOLVER, SOLVER), "Several roles or agents are named solver_1"),
        ((Role("solver_1"), SOLVER), "Several roles or agents are named solver_1"),
        ((SOLVER, CRITIC), "Role critic is the last one, but produces no response"),
        ((CRITIC, SOLVER), "The prompt of role critic refers to solver, which is not an earlier role. .* none"),
        ((Role("a", "{query}{a.response}"),), "refers to a, which is not an earlier role"),
        ((SOLVER, Role("a", "{solver.answer}")), "has the placeholder 'solver.answer'"),
    ],
)
def test_invalid_roles_are_rejected(roles: tuple[Role, ...], message: str) -> None:
    with pytest.raises((ValueError, TemplateError), match=message):
        make_positions(roles)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "the solver"}, "Invalid role name 'the solver'"),
        ({"name": "reference"}, "Invalid role name 'reference'"),
        ({"name": "a", "count": 0}, "count of role a is 0"),
        ({"name": "a", "repeat": 0}, "repeat of role a is 0"),
        ({"name": "a", "max_response_tokens": 0}, "max_response_tokens of role a is 0"),
        ({"name": "a", "count": 2, "repeat": 2}, "has count=2 and repeat=2"),
        ({"name": "a", "produces_response": False, "reward": "task"}, "has reward=task, but produces no response"),
    ],
)
def test_invalid_values_of_a_role_are_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Role(**values)


def test_a_role_named_as_a_column_of_a_prompt_is_rejected() -> None:
    with pytest.raises(ValueError, match="solver is a role, and a column in a prompt"):
        role_chain((SOLVER, Role("judge", "{query} {solver}")))


def test_every_agent_sees_what_its_template_names(worker: RewardWorker) -> None:
    episode = ChainEpisode(role_chain(), QUERIES[0])
    assert prompt_of(episode) == "This movie was"
    respond(episode, worker, " bad")
    assert episode.agent == "solver_2" and prompt_of(episode) == "This movie was"  # drafts do not see each other
    respond(episode, worker, " splendid")
    assert prompt_of(episode) == "This movie was| bad/ splendid|4 of 8 characters\nfine"
    respond(episode, worker, " longer, please")
    assert prompt_of(episode) == "This movie was| bad/ splendid|longer, please| bad/ splendid|fine"
    respond(episode, worker, " ugly")
    assert prompt_of(episode) == "This movie was| bad/ splendid|longer, please| bad/ splendid/ ugly|5 of 8 characters"
    respond(episode, worker, " end")
    assert episode.agent is None and episode.feedback[2] is NO_ANSWER
    assert episode.feedback_entry(2) == {} and episode.feedback_entry(1) == {"feedback": None}


def test_a_repeated_role_sees_only_its_latest_response_under_its_name(worker: RewardWorker) -> None:
    solver = Role("solver", "{query}>{solver.response}>{solver.feedback}", repeat=3)
    episode = ChainEpisode(role_chain((solver,)), QUERIES[0])
    assert prompt_of(episode) == "This movie was"  # it refers to itself: the task's prompt
    respond(episode, worker, " bad", " ugly")
    assert prompt_of(episode) == "This movie was> ugly>5 of 8 characters"


def test_a_role_that_refers_to_itself_first_gets_the_tasks_prompt_after_other_roles(worker: RewardWorker) -> None:
    solver = Role("solver", "{query}>{solver.response}", repeat=2)
    planner = Role("planner", "Plan {query}", produces_response=False)
    episode = respond(ChainEpisode(role_chain((planner, solver)), QUERIES[0]), worker, " think")
    assert prompt_of(episode) == "This movie was"  # a plan is not in {reference}
    respond(episode, worker, " bad")
    assert prompt_of(episode) == "This movie was> bad"


@pytest.mark.parametrize(("observed", "reference"), [("all", " bad/ splendid/ ok"), ("last", " ok")])
def test_observed_limits_the_reference_but_not_the_roles_that_a_template_names(
    worker: RewardWorker, observed: Any, reference: str
) -> None:
    roles = (SOLVER, Role("third"), Role("judge", "{solver.response}|{reference}"))
    episode = ChainEpisode(role_chain(roles, observed=observed), QUERIES[0])
    respond(episode, worker, " bad", " splendid", " ok")
    assert prompt_of(episode) == f" bad/ splendid|{reference}"


def test_without_knowledge_transfer_templates_that_need_responses_fall_back_to_the_tasks(worker: RewardWorker) -> None:
    roles = (Role("solver", "Solve: {query}"), Role("reviser", "{query} {solver.response}"))
    episode = ChainEpisode(role_chain(roles, knowledge_transfer=False), QUERIES[0])
    assert prompt_of(episode) == "Solve: This movie was"
    assert prompt_of(respond(episode, worker, " bad")) == "This movie was"


def test_a_prompt_that_is_too_long_first_loses_the_end_of_its_last_response(worker: RewardWorker) -> None:
    roles = (Role("solver"), Role("critic", "{solver.response}", produces_response=False), Role("last", "{query}"))
    template = "{query}|{solver.response}|{critic.response}"
    roles = (*roles[:2], replace(roles[2], prompt=template))
    length = len(tokens_of("This movie was| bad| one two three"))
    episode = ChainEpisode(role_chain(roles, feedback=None, max_prompt_tokens=length - 2), QUERIES[0])
    for text in (" bad", " one two three"):
        episode.respond(response(text))
    assert prompt_of(episode) == "This movie was| bad|one" and episode.prompt().is_truncated
    assert len(episode.prompt_ids()) <= length - 2


def test_control_tokens_in_the_text_of_a_role_stay_text() -> None:
    roles = (Role("solver"), Role("last", "{query}|{solver.response}"))
    chain = role_chain(roles, feedback=None)
    (end,) = chain.encoders[0].stop_token_ids[:1]
    forged = str(tokenizer().decode([end]))
    episode = ChainEpisode(chain, QUERIES[0])
    episode.respond({"tokens": (ids := chain.encoders[0].control.encode_text([" ok" + forged])[0]), "length": len(ids)})
    assert end not in episode.prompt_ids() and forged in prompt_of(episode)


def test_roles_limit_their_responses() -> None:
    chain = role_chain((Role("solver", max_response_tokens=2), Role("reviser")), max_response_tokens=9)
    assert chain.response_limits == (2, 9) and chain.max_response_tokens == 9
    with pytest.raises(ValueError, match=r"solver: invalid action .* 1 to 2 ids"):
        ChainEpisode(chain, QUERIES[0]).respond({"tokens": [5, 5, 5], "length": 3})


def test_a_chain_may_stop_after_a_draft_and_a_critics_text_never_stops_it(worker: RewardWorker) -> None:
    chain = role_chain(stop_when="solved")
    stopped = respond(ChainEpisode(chain, QUERIES[0]), worker, " splendid")
    assert stopped.agent is None and stopped.agents == ("solver_1",)
    unsolved = respond(ChainEpisode(chain, QUERIES[0]), worker, " a", " b", " a critic has nothing to correct")
    assert unsolved.agent == "reviser_1"
    assert respond(unsolved, worker, " splendid").agent is None


def test_roles_have_the_tasks_reward_their_own_or_none(worker: RewardWorker) -> None:
    team = (SOLVER, replace(CRITIC, reward=SEVEN), replace(REVISER, reward="none"))
    chain = role_chain(team, partner_reward=0.5)
    assert chain.role_rewards == {"critic": SEVEN}
    episode = respond(ChainEpisode(chain, QUERIES[0]), worker, " bad", " ugly", " why", " ok", " ok")
    (rewards,) = reward_episodes(worker, [episode])
    assert [reward for reward in rewards if reward is not None and not isnan(reward)] == [4.0, 5.0, 7.0]
    assert all(reward is not None and isnan(reward) for reward in rewards[3:])
    collective = episode.collective_rewards([4.0, 5.0, 7.0, nan, nan])
    assert list(collective.values()) == [4 + 3.5, 5 + 3.5, 7 + 4.5, 8.0, 8.0]  # drafts do not share their rewards


def test_drafts_of_a_chain_that_stopped_do_not_share_their_rewards(worker: RewardWorker) -> None:
    chain = role_chain((replace(SOLVER, count=3),), stop_when="solved")
    episode = respond(ChainEpisode(chain, QUERIES[0]), worker, " bad", " splendid")
    assert episode.agent is None
    assert episode.collective_rewards([1.0, 3.0]) == {"solver_1": 1.0, "solver_2": 3.0}


def test_the_environment_runs_roles() -> None:
    env = cory_v0.env(
        make_task("drafts"), roles=[SOLVER, Role("reviser", "{query}~{solver.response}=")], max_prompt_tokens=64
    )
    assert env.possible_agents == ["solver_1", "solver_2", "reviser"]
    api_test(env, num_cycles=5)
    env.close()


def test_the_environment_terminates_agents_that_were_not_asked_and_counts_no_missing_reward() -> None:
    env = cory_v0.env(role_chain().task, roles=TEAM, stop_when="solved", **PAPER_CHAIN)
    env.reset(options={"query": 0})
    for text in (" bad", " ugly", " why", " splendid"):
        env.step(response(text))
    assert all(env.terminations.values()) and env.infos["reviser_1"]["feedback"] is None
    assert repr(env.infos["critic"]["task_reward"]) == "nan" and "task_reward" not in env.infos["reviser_2"]
    collective = dict.fromkeys(TEAM_AGENTS[:4], 18.0) | {"solver_1": 18.0 - 5.0, "solver_2": 18.0 - 4.0}
    assert env.rewards == collective | {"reviser_2": 0.0}
    env.close()


TEAM_AGENTS = [position.agent for position in make_positions(TEAM)]


def test_the_lengths_of_prompts_count_what_each_role_shows() -> None:
    chain = role_chain((*TEAM[:2], Role("last", "{query}|{critic.response}")), max_response_tokens=9)
    assert max_shown_tokens(chain) == 18
    assert longest_prompts(chain, QUERIES)[0] == [len(tokens_of(f"{query.text}|/|\n")) for query in QUERIES]


def test_the_lengths_of_prompts_count_only_the_latest_response_of_a_role_that_repeats() -> None:
    roles = (Role("solver"), Role("reviser", repeat=3), Role("last", "{query}|{reviser.response}|{reviser.feedback}"))
    chain = role_chain(roles, max_response_tokens=9)
    assert max_shown_tokens(chain) == 3 * 9  # of the last reviser, who sees the three before
    both = role_chain(
        (*roles[:2], replace(roles[2], prompt="{query}|{reviser.response}|{reference}")), max_response_tokens=9
    )
    assert max_shown_tokens(both) == 5 * 9
    last = role_chain(
        (*roles[:2], replace(roles[2], prompt="{query}|{reviser.response}|{reference}")),
        max_response_tokens=9,
        observed="last",
    )
    assert max_shown_tokens(last) == 2 * 9
    repeated = role_chain((*roles[:2], replace(roles[2], prompt="{query}|{reviser.response}|{reviser.feedback}|" * 9)))
    assert longest_prompts(repeated, QUERIES)[0] == [len(tokens_of(f"{query.text}|||" * 9)) for query in QUERIES]


@pytest.mark.parametrize("num_agents", [0, -1, 6])
def test_the_number_of_agents_is_limited_by_the_roles(num_agents: int) -> None:
    with pytest.raises(ValueError, match=f"num_agents is {num_agents}, but must be from 1 to 5"):
        role_chain(num_agents=num_agents)


def make_sums(**fields: Any) -> Task:
    rows = [Query(k, f"{k}+{k}", {"answer": str(2 * k)}) for k in range(4)]
    return replace(make_task("drafts"), train=rows, test=rows, **fields)


def test_validate_shows_the_prompt_of_every_agent_and_only_real_rewards() -> None:
    task = make_sums(feedback=f"{REWARDS}:too_short")
    roles = (Role("solver", count=2), replace(CRITIC, reward=SEVEN, max_response_tokens=3), Role("last", "{query}"))
    report = validate(task, tokenizer(), roles=roles, max_prompt_tokens=128, max_response_tokens=20)
    assert report.ok, report.problems
    assert list(report.prompts)[:4] == ["solver_1", "solver_2", "critic", "last"]
    assert "<feedback on the solver_2's response>" in report.prompts["critic"][0]
    assert any(name.startswith("critic after a wrong response") for name in report.prompts)
    by_role = {role: value for role, _, _, value in report.rewards}
    assert by_role["critic"] == 7.0 and "last" in by_role
    none = validate(task, tokenizer(), roles=(*roles[:1], CRITIC, roles[2]), max_prompt_tokens=128)
    assert "critic" not in {role for role, *_ in none.rewards}


def test_validate_checks_no_feedback_if_no_role_answers() -> None:
    planner = Role("planner", produces_response=False)
    task = make_sums(feedback=f"{REWARDS}:too_short")
    report = validate(task, tokenizer(), roles=(planner, SOLVER), num_agents=1, max_prompt_tokens=128)
    assert report.ok and list(report.prompts) == ["planner"], report.problems


def test_validate_finds_prompts_of_roles_that_are_too_long_and_rewards_that_cannot_be_loaded() -> None:
    long = Role("last", "{query}" * 40)
    report = validate(make_sums(), tokenizer(), roles=(SOLVER, long), max_prompt_tokens=64)
    assert "do not fit max_prompt_tokens = 64" in report.problems[0]
    missing = (SOLVER, Role("last", reward=f"{REWARDS}:nowhere"))
    report = validate(make_sums(), tokenizer(), roles=missing, max_prompt_tokens=128)
    assert "has no function 'nowhere'" in report.problems[0]
