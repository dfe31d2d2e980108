"""Thoughts of reasoning models: where they end, and that nobody else sees them."""

from collections.abc import Iterator
from copy import copy, deepcopy
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from cory_env import cory_v0
from cory_env.chain import Chain
from cory_env.chain_settings import Role, Thinking
from cory_env.decoding import ThinkingError
from cory_env.episode import ChainEpisode
from cory_env.rewarding.episodes import compute_awaited, reward_episodes
from cory_env.rewarding.worker import RewardWorker
from cory_env.tasks import Task
from cory_env.tasks.turns import NO_ANSWER
from cory_env.tokenizer import DEFAULT_TOKENIZER, load_tokenizer
from tests.cory_env.sample_tasks import LENGTH, QUERIES, reviews, validate
from tests.cory_env.test_feedback import TOO_SHORT
from tests.thinking_model import TAGS, TEMPLATE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BOTH = ["special tokens", "plain tokens"]
OBSERVER = "{query}: {reference} ({feedback}) {query}"


CUT_OFF = ("<think> hm good", " a</think> b<think> c")


@cache
def thinker(special: bool = True) -> "PreTrainedTokenizerBase":
    """The bundled tokenizer with the tags, which decoding drops if they are special tokens."""
    tokenizer = load_tokenizer(str(DEFAULT_TOKENIZER))
    tokenizer.add_tokens([*TAGS], special_tokens=special)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def task(**fields: Any) -> Task:
    values = {"feedback": TOO_SHORT, "observer_template": OBSERVER, "solved_feedback": "fine", **fields}
    return replace(reviews(), **values)


def make_chain(special: bool = True, num_agents: int = 2, **settings: Any) -> Chain:
    thinking = Thinking(*TAGS)
    return Chain(task(), thinker(special), num_agents=num_agents, thinking=thinking, **{"chat": False, **settings})


def copy_of(episode: ChainEpisode) -> ChainEpisode:
    return deepcopy(episode, {id(episode.chain): episode.chain})


def respond(episode: ChainEpisode, *texts: str) -> ChainEpisode:
    """Lets the agents respond with texts whose tags are tokens."""
    for text in texts:
        tokens = thinker()(text, add_special_tokens=False)["input_ids"]
        episode.respond({"tokens": tokens, "length": len(tokens)})
    return episode


@pytest.fixture(scope="module")
def worker() -> Iterator[RewardWorker]:
    with RewardWorker(LENGTH, feedback=TOO_SHORT) as reward_worker:
        yield reward_worker


@pytest.mark.parametrize("special", [True, False], ids=BOTH)
@pytest.mark.parametrize(
    ("text", "answer", "thought"),
    [
        ("<think> hm</think> good", " good", " hm"),
        ("<think></think> good", " good", ""),
        ("<think> hm</think>", "", " hm"),
        (" good", " good", None),  # did not think
        ("<think> hm good", "", " hm good"),  # cut off
        (" hm</think> good", " hm</think> good", None),  # no thought has begun
        (" a</think> b<think> c</think> d", " d", " c"),
        (" a</think> b<think> c", "", " c"),
        (" So<think> hm</think> good", " good", " hm"),
        ("<think> a</think> b</think> c", " b</think> c", " a"),
    ],
)
def test_a_response_is_split_at_the_first_end_tag(special: bool, text: str, answer: str, thought: str | None) -> None:
    episode = respond(ChainEpisode(make_chain(special), QUERIES[0]), text)
    assert (episode.completions, episode.thought(0)) == ([answer], thought)
    assert episode.full_text(0) == text  # with the tags, although decoding drops special tokens
    assert episode.has_answer(0) == (episode.answer_starts[0] is not None) == (text not in CUT_OFF)


@pytest.mark.parametrize("special", [True, False], ids=BOTH)
def test_a_template_may_begin_the_thought(special: bool) -> None:
    episode = ChainEpisode(make_chain(special, chat=True), QUERIES[0])
    assert thinker().decode(episode.prompt_ids()).endswith("<|assistant|><think>\n")
    assert respond(copy_of(episode), " hm</think> good").completions == [" good"]
    cut_off = respond(copy_of(episode), " hm good")
    assert (cut_off.completions, cut_off.thought(0), cut_off.answer_starts) == ([""], " hm good", [None])
    closed = ChainEpisode(make_chain(special, chat=True, chat_template_kwargs={"enable_thinking": False}), QUERIES[0])
    assert thinker().decode(closed.prompt_ids()).endswith("<|assistant|><think>\n</think>\n\n")
    assert respond(closed, " good").completions == [" good"] and closed.thought(0) is None


def test_a_tag_in_a_query_does_not_begin_the_thought() -> None:
    chain = make_chain(False, chat=True, chat_template_kwargs={"enable_thinking": False})
    query = replace(QUERIES[0], text="What does <think> mean?")
    assert respond(ChainEpisode(chain, query), " good").completions == [" good"]


@pytest.mark.parametrize("chat_template", [None, "{% for m in messages %}{{ m.content }}{% endfor %}"])
@pytest.mark.parametrize(
    ("template", "first", "feedback", "begins"),
    [
        ("{query} {reference}", " bad <think>", "more", False),  # a response that was cut in its thought
        ("{query} {reference}\n", " a</think> b <think>", "more", False),
        ("{query} {reference}: {feedback}", " bad", "end with <think>\n", False),
        ("{reference} {feedback} {query}", " bad", "more", False),  # the query ends with the tag
        ("{query} {reference}\n<think>\n", " bad <think>", "more", True),
        ("{feedback} {query}{reference}<think>", " <think>", "<think>", True),
        ("{query} <think> {reference}", " bad <think>", "more", False),
        ("{query} {{<think>}} {reference}", " bad <think>", "more", False),
    ],
)
def test_only_the_template_of_a_prompt_begins_the_thought(
    chat_template: str | None, template: str, first: str, feedback: str, begins: bool
) -> None:
    tokenizer = copy(thinker(special=False))  # as in the tokenizers of Qwen3 and DeepSeek-R1
    tokenizer.chat_template = chat_template
    data, query = task(observer_template=template), replace(QUERIES[0], text="It ends with <think>")
    settings: dict[str, Any] = {"thinking": Thinking(*TAGS), "chat": chat_template is not None}
    for roles in (None, [Role("draft", count=2), Role("last")], [Role("a"), Role("b", prompt=template)]):
        episode = ChainEpisode(Chain(data, tokenizer, roles=roles, **settings), query)
        assert not episode.prompt().begins_thought
        drafts = len(episode.chain.agents) - 1
        respond(episode, *[first] * drafts)
        episode.note_feedback([feedback if episode.has_answer(k) else NO_ANSWER for k in range(drafts)])
        assert episode.prompt().begins_thought == begins
        completions = (
            respond(copy_of(episode), " good").completions,
            respond(episode, " hm</think> good").completions,
        )
        assert [texts[-1] for texts in completions] == (["", " good"] if begins else [" good", " hm</think> good"])


def test_a_thought_ends_at_its_first_end_tag_and_has_no_tags() -> None:
    tags = make_chain().encoders[0].tags
    assert tags is not None
    start, end = tags.start_id, tags.end_id
    for inside, tokens, expected in (
        (True, [5, 6, end, 7, end, 8], ([5, 6], [7, end, 8])),
        (True, [start, 5, end, 7], ([5], [7])),
        (True, [5, 6], ([5, 6], [])),
        (True, [end, 7], ([], [7])),
        (False, [start, 5, end, 7], ([5], [7])),
        (False, [4, start, 5, end, 7], ([5], [7])),
        (False, [5, end, 6], (None, [5, end, 6])),
        (True, [5, start, 6, end, start, 7], ([5, 6], [start, 7])),
    ):
        index = tags.answer_start(tokens, inside)
        assert (tags.thought(tokens, inside), [] if index is None else tokens[index:]) == expected


def test_nobody_sees_the_thought(worker: RewardWorker) -> None:
    episode = respond(ChainEpisode(make_chain(), QUERIES[0]), "<think> hm hm hm</think> bad")
    compute_awaited(worker, [episode])
    assert episode.feedback == ["4 of 8 characters"]
    assert thinker().decode(episode.prompt_ids()) == "This movie was:  bad (4 of 8 characters) This movie was"
    respond(episode, " good")
    assert reward_episodes(worker, [episode]) == [[4.0, 5.0]]


def test_a_thought_that_was_cut_off_is_no_answer(worker: RewardWorker) -> None:
    chain = make_chain(num_agents=3, stop_when="solved")
    episode = respond(ChainEpisode(chain, QUERIES[0]), "<think> hm hm hm hm")
    assert not episode.is_waiting and episode.agent == "observer_1"
    assert thinker().decode(episode.prompt_ids()) == "This movie was:  () This movie was"
    respond(episode, "<think> hm</think> bad")
    compute_awaited(worker, [episode])
    assert episode.feedback == [NO_ANSWER, "4 of 8 characters"] and episode.feedback_entry(0) == {}
    assert thinker().decode(episode.prompt_ids()) == "This movie was:  bad (4 of 8 characters) This movie was"
    respond(episode, "<think>")
    assert reward_episodes(worker, [episode]) == [[0.0, 4.0, 0.0]]
    assert [episode.shown_tokens(k) for k in (0, 2)] == [[], []]


def test_tags_must_be_tokens_of_the_model() -> None:
    with pytest.raises(ThinkingError, match=r"thinking.end='</thought>' is not a token of .*or set thinking=null"):
        Chain(task(), thinker(), thinking=Thinking("<think>", "</thought>"))
    with pytest.raises(ThinkingError, match=r"thinking.start='<think>' is not a token"):  # it has no embedding
        Chain(task(), thinker(), thinking=Thinking(*TAGS), vocab_size=4096)
    with pytest.raises(ValueError, match="needs two different ones"):
        Thinking("<think>", "<think>")
    with pytest.raises(ValueError, match=r"stop='\\n' conflicts with thinking"):
        make_chain(stop="\n")


def test_the_environment_trains_on_the_thought_and_rewards_the_answer() -> None:
    env = cory_v0.env(
        reviews(), 1, tokenizer=thinker(), chat=True, thinking=Thinking(*TAGS), render_mode="ansi", reward_timeout=30
    )
    env.reset(seed=0, options={"query": 0})
    tokens = thinker()(" hm</think> good", add_special_tokens=False)["input_ids"]
    env.step({"tokens": tokens, "length": len(tokens)})
    assert env.rewards == {"pioneer": 5.0}
    info = env.infos["pioneer"]
    assert (info["completion"], info["reasoning"]) == (" good", " hm")
    assert env.render() == "query 0: This movie was\npioneer [task reward 5.000]: hm</think> good"
    env.close()


def test_validate_warns_of_queries_that_end_with_the_tag() -> None:
    queries = [replace(QUERIES[0], id=0, text="Why? <think>\n"), replace(QUERIES[1], id=1)]
    report = validate(replace(task(), train=queries), thinker(), thinking=Thinking(*TAGS), max_prompt_tokens=None)
    assert "1 training queries end with <think>. Only a template begins a thought." in report.warnings


def test_validate_answers_after_the_thought_that_a_template_begins() -> None:
    report = validate(task(), thinker(), num_agents=2, chat=True, thinking=Thinking(*TAGS), max_prompt_tokens=None)
    assert report.ok, report.problems
    assert "<pioneer's response>" in report.prompts["observer"][0]
    wrong = report.prompts["observer after a wrong response to query 0"][0]
    assert "of 8 characters" in wrong or "fine" in wrong
