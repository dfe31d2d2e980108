"""Feedback in the episode, the reward process and the environment, and chains that stop."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pettingzoo.test import api_test

from cory_env import cory_v0
from cory_env.chain import Chain
from cory_env.episode import ChainEpisode
from cory_env.rewarding.episodes import compute_awaited, reward_episodes
from cory_env.rewarding.worker import RewardError, RewardWorker
from cory_env.tasks import TASKS, Query, Task, make_task
from cory_env.tasks.turns import SKIPPED, SeenResponse
from tests.cory_env.sample_rewards import BAD
from tests.cory_env.sample_tasks import (
    LENGTH,
    PAPER_CHAIN,
    QUERIES,
    chain,
    response,
    reviews,
    tokenizer,
    tokens_of,
    validate,
)
from tests.cory_env.test_cory_v0 import action

REWARDS = "tests.cory_env.sample_rewards"
TOO_SHORT = f"{REWARDS}:too_short"  # None from 8 characters on
TEMPLATE = "{query}: {reference} ({feedback}) {query}"


def feedback_task(**fields: Any) -> Task:
    values = {"feedback": TOO_SHORT, "observer_template": TEMPLATE, "solved_feedback": "fine", **fields}
    return replace(reviews(), **values)


def feedback_chain(num_agents: int = 2, task: Task | None = None, **settings: Any) -> Chain:
    return Chain(task or feedback_task(), tokenizer(), num_agents=num_agents, **{**PAPER_CHAIN, **settings})


def answer(episode: ChainEpisode, worker: RewardWorker, *texts: str) -> ChainEpisode:
    for text in texts:
        episode.respond(response(text))
        compute_awaited(worker, [episode])
    return episode


@pytest.fixture
def worker() -> Any:
    with RewardWorker(LENGTH, feedback=TOO_SHORT) as reward_worker:
        yield reward_worker


def finished_episode(chain: Chain) -> ChainEpisode:
    episode = ChainEpisode(chain, QUERIES[0])
    while episode.agent is not None:
        episode.respond({"tokens": [5], "length": 1})
    return episode


@pytest.mark.parametrize(
    ("alpha", "expected"), [(1.0, [7.0, 7.0, 7.0]), (0.0, [1.0, 2.0, 4.0]), (-1.0, [-5.0, -3.0, 1.0])]
)
def test_collective_rewards_add_alpha_times_the_partners_rewards(alpha: float, expected: list[float]) -> None:
    episode = finished_episode(chain(3, partner_reward=alpha))
    assert list(episode.collective_rewards([1.0, 2.0, 4.0]).values()) == expected


def test_with_alpha_one_all_collective_rewards_are_exactly_equal() -> None:
    episode = finished_episode(chain(4))
    assert len(set(episode.collective_rewards([0.1, 1e16, -0.3, -1e16]).values())) == 1
    with pytest.raises(ValueError, match="Expected 4 task rewards"):
        episode.collective_rewards([1.0])


def test_the_next_prompt_shows_the_feedback_on_the_last_response(worker: RewardWorker) -> None:
    episode = answer(ChainEpisode(feedback_chain(3), QUERIES[0]), worker, " bad")
    assert tokenizer().decode(episode.prompt_ids()) == "This movie was:  bad (4 of 8 characters) This movie was"
    answer(episode, worker, " splendid")  # no stop_when, so the third agent responds too
    reference = 'bad" and this sentence "This movie was splendid'
    assert tokenizer().decode(episode.prompt_ids()) == f"This movie was:  {reference} (fine) This movie was"
    assert episode.feedback == ["4 of 8 characters", None] and episode.agent == "observer_2"


def test_a_prompt_requires_the_feedback_that_it_shows() -> None:
    episode = ChainEpisode(feedback_chain(), QUERIES[0])
    episode.respond(response(" bad"))
    assert episode.is_waiting
    with pytest.raises(ValueError, match="compute_awaited"):
        episode.prompt_ids()
    with pytest.raises(ValueError, match="expects 1"):
        episode.note_feedback([])


def test_feedback_is_not_computed_if_nothing_depends_on_it() -> None:
    hidden = feedback_task(observer_template="{query} {reference}")
    for unused in (feedback_chain(task=hidden), feedback_chain(knowledge_transfer=False)):
        episode = ChainEpisode(unused, QUERIES[0])
        episode.respond(response(" bad"))
        assert not episode.is_waiting and episode.prompt_ids()


def test_a_chain_stops_when_nothing_is_to_be_corrected(worker: RewardWorker) -> None:
    stopping = feedback_chain(3, stop_when="solved")
    episode = answer(ChainEpisode(stopping, QUERIES[0]), worker, " bad", " splendid")
    assert episode.agent is None and episode.agents == ("pioneer", "observer_1")
    assert reward_episodes(worker, [episode]) == [[4.0, 9.0]]
    assert episode.collective_rewards([4.0, 9.0]) == {"pioneer": 13.0, "observer_1": 13.0}
    with pytest.raises(ValueError, match="takes no more actions"):
        episode.respond(response(" more"))
    unsolved = answer(ChainEpisode(stopping, QUERIES[0]), worker, " a", " b", " c")
    assert unsolved.agent is None and unsolved.feedback == ["2 of 8 characters"] * 2  # none on the last response


def test_feedback_may_stop_chains_without_being_shown(worker: RewardWorker) -> None:
    hidden = feedback_task(observer_template="{query} {reference}")
    for stopping in (
        feedback_chain(task=hidden, stop_when="solved"),
        feedback_chain(knowledge_transfer=False, stop_when="solved"),
    ):
        assert answer(ChainEpisode(stopping, QUERIES[0]), worker, " splendid").agent is None
        assert "characters" not in tokenizer().decode(
            answer(ChainEpisode(stopping, QUERIES[0]), worker, " bad").prompt_ids()
        )


def test_stop_when_requires_feedback_and_a_known_value() -> None:
    with pytest.raises(ValueError, match="requires feedback"):
        chain(stop_when="solved")
    with pytest.raises(ValueError, match="stop_when is 'right'"):
        feedback_chain(stop_when="right")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises_feedback", "The feedback .*raises_feedback failed on sample 0 of 2.*beyond me"),
        ("numbers_as_feedback", "returned 1.0 .float. instead of a text or None"),
        (
            "half_an_emoji",
            r"failed on sample 0 of 2.* returned 'bad \\ud83d' .str.: the text contains half of a surrogate",
        ),
        ("raises_half_an_emoji", r"failed on sample 0 of 2.* raised ValueError: bad \\ud83d\n"),
        ("one_text", "returned 'fine' .str. instead of a list of 1 texts .or None."),
    ],
)
def test_failing_feedback_stops_with_its_name_and_the_sample(function: str, message: str) -> None:
    episodes = [ChainEpisode(feedback_chain(), query) for query in QUERIES[:2]]
    with RewardWorker(LENGTH, feedback=f"{REWARDS}:{function}") as worker:
        for episode in episodes:
            episode.respond(response(BAD))
        with pytest.raises(RewardError, match=message):
            compute_awaited(worker, episodes)


@pytest.mark.parametrize("function", ["raises_feedback", "half_an_emoji", "raises_half_an_emoji"])
def test_skipped_feedback_drops_only_its_chain(function: str) -> None:
    with RewardWorker(LENGTH, feedback=f"{REWARDS}:{function}", on_error="skip") as worker:
        episodes = [ChainEpisode(feedback_chain(), query) for query in QUERIES[:2]]
        for episode, text in zip(episodes, (BAD, " fine"), strict=True):
            episode.respond(response(text))
        compute_awaited(worker, episodes)
        assert worker.skipped == 1
        assert episodes[0].feedback == [SKIPPED] and episodes[0].agent is None
        assert episodes[1].feedback == ["fine"] and episodes[1].agent == "observer"
        episodes[1].respond(response(" good"))
        assert reward_episodes(worker, episodes) == [[None], [5.0, 5.0]]


def test_chains_whose_feedback_was_skipped_are_not_rewarded() -> None:
    with RewardWorker(f"{REWARDS}:raises", feedback=f"{REWARDS}:raises_feedback", on_error="skip") as worker:
        episode = ChainEpisode(feedback_chain(), QUERIES[0])
        episode.respond(response(BAD))
        compute_awaited(worker, [episode])
        assert reward_episodes(worker, [episode]) == [[None]] and worker.skipped == 1


def test_long_feedback_is_truncated_after_the_reference_and_before_the_query() -> None:
    encoder, great_fun = feedback_chain(max_prompt_tokens=24).encoders[1], tokens_of(" great fun")
    full = encoder.build_prompt(QUERIES[0], [SeenResponse.decoded(encoder.decode, great_fun, "why not")])
    assert not full.is_truncated
    prompt = encoder.build_prompt(QUERIES[0], [SeenResponse.decoded(encoder.decode, great_fun, "why " * 30)])
    text = tokenizer().decode(prompt.tokens)
    assert prompt.is_truncated and len(prompt.tokens) <= 24 and len(full.tokens) <= 24
    assert "great" not in text and "why why" in text and text.endswith("This movie was")


def test_the_feedback_on_a_response_without_remaining_tokens_stays_in_the_prompt() -> None:
    text = "This movie was:  good (two) This movie was"
    encoder = feedback_chain(max_prompt_tokens=len(tokens_of(text))).encoders[1]
    responses = [
        SeenResponse.decoded(encoder.decode, tokens_of(answer), feedback)
        for answer, feedback in ((" good", "one"), (" great fun", "two"))
    ]
    prompt = encoder.build_prompt(QUERIES[0], responses)
    assert prompt.is_truncated and tokenizer().decode(prompt.tokens) == text


def test_feedback_cannot_forge_control_tokens() -> None:
    end = tokenizer().eos_token
    (plain,) = feedback_chain().encoders[0].encode_prompts([QUERIES[0]], [SeenResponse(" good", "fine")])
    (forged,) = feedback_chain().encoders[0].encode_prompts([QUERIES[0]], [SeenResponse(" good", f"fine{end}")])
    assert forged.count(tokenizer().eos_token_id) == plain.count(tokenizer().eos_token_id)


def make_env(num_agents: int = 2, **settings: Any) -> cory_v0.raw_env:
    return cory_v0.env(
        feedback_task(), num_agents, tokenizer=tokenizer(), stop_when="solved", **{**PAPER_CHAIN, **settings}
    )


@pytest.mark.filterwarnings("ignore::UserWarning")  # api_test's advice on Dict spaces and numbered names
@pytest.mark.parametrize("num_agents", [2, 3])
def test_an_environment_that_stops_passes_the_api_test(num_agents: int) -> None:
    env = make_env(num_agents)
    api_test(env, num_cycles=100)
    env.close()


def test_an_agent_that_is_never_asked_terminates_without_reward() -> None:
    env = make_env(3)
    env.reset(options={"query": 1})
    env.step(action(env, " like it"))
    assert env.terminations == {"pioneer": True, "observer_1": True, "observer_2": True}
    assert env.rewards == {"pioneer": 8.0, "observer_1": 0.0, "observer_2": 0.0}
    assert env.infos["pioneer"] == {
        **{"query": 1, "truncated_prompt": False},
        **{"task_reward": 8.0, "completion": " like it", "feedback": None},
    }
    assert env.infos["observer_1"] == {"query": 1} and env.observe("observer_1")["length"] == 0
    for _ in range(3):
        env.step(None)
    assert env.agents == []
    env.reset(options={"query": 1})
    env.step(action(env, " it"))
    assert env.agent_selection == "observer_1" and not any(env.terminations.values())
    env.close()


@pytest.mark.parametrize("name", ["imdb", "arithmetic"])
def test_default_templates_show_feedback_of_the_user_s_function(name: str) -> None:
    task = make_task(name, feedback=TOO_SHORT)
    assert task.feedback == TOO_SHORT and task.shows_feedback and "Feedback: {feedback}\n" in task.observer_template
    assert not make_task(name).shows_feedback


def test_own_feedback_is_used_only_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    definition = replace(
        TASKS["drafts"], feedback=TOO_SHORT, feedback_prompt="{query}~{reference}~{feedback}=", solved_feedback="ok"
    )
    monkeypatch.setitem(TASKS, "drafts", definition)
    task = make_task("drafts", feedback="task")
    assert (task.feedback, task.solved_feedback) == (TOO_SHORT, "ok")
    assert task.observer_prompt(Query(0, "1+2+3"), ["4"], "no") == "1+2+3~4~no="
    assert make_task("drafts").observer_prompt(Query(0, "1+2+3"), ["4"]) == "1+2+3~4="
    assert make_task("drafts", feedback="task", observer_prompt="{query}{reference}=").feedback == TOO_SHORT
    with pytest.raises(ValueError, match="feedback=task requires a task with its own feedback function"):
        make_task("arithmetic", feedback="task")
    with pytest.raises(ValueError, match="Invalid feedback 'nonsense'"):
        make_task("arithmetic", feedback="nonsense")


def gold_task(**fields: Any) -> Task:
    return make_task("arithmetic?digits=1", **fields)


@pytest.mark.parametrize(
    ("function", "matches"),
    [
        ("too_short", lambda warnings: not any("gold answer" in warning for warning in warnings)),
        ("tells_answer", lambda warnings: any("contains the gold answer" in warning for warning in warnings)),
    ],
)
def test_validate_shows_prompts_with_feedback_and_warns_of_leaked_answers(
    function: str, matches: Callable[[list[str]], bool]
) -> None:
    report = validate(
        gold_task(feedback=f"{REWARDS}:{function}"), tokenizer(), max_prompt_tokens=None, max_response_tokens=12
    )
    assert report.ok and matches(report.warnings)
    shown = {name: prompt for name, (prompt, _) in report.prompts.items() if "wrong response" in name}
    assert len(shown) == 3 and all("Feedback: " in prompt for prompt in shown.values())
