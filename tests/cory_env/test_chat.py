"""Prompts in a chat template, conversations, and several stop tokens."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cory_env import cory_v0
from cory_env.chain import Chain
from cory_env.chat import ChatError
from cory_env.episode import ChainEpisode
from cory_env.rewarding.episodes import reward_episodes
from cory_env.rewarding.examples import gold_answers, reward_answers
from cory_env.rewarding.worker import RewardWorker
from cory_env.tasks import Message, Query, Task, make_task
from cory_env.tokenizer import DEFAULT_TOKENIZER, load_tokenizer
from tests.cory_env.sample_tasks import LENGTH, QUERIES, response, reviews, tokenizer, validate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
HISTORY = (
    Message(role="system", content="Be brief."),
    Message(role="user", content="Hi"),
    Message(role="assistant", content="Hello"),
)


@pytest.fixture(scope="module")
def chat_tokenizer() -> "PreTrainedTokenizerBase":
    """A tokenizer like those of instruction-tuned models: both its template and its defaults add the BOS."""
    from tokenizers.processors import TemplateProcessing

    chat_tokenizer = load_tokenizer(str(DEFAULT_TOKENIZER))
    chat_tokenizer.add_special_tokens(
        {"bos_token": "<s>", "eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    )
    chat_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", chat_tokenizer.bos_token_id)]
    )
    chat_tokenizer.chat_template = TEMPLATE
    assert chat_tokenizer("a")["input_ids"][0] == chat_tokenizer.bos_token_id
    return chat_tokenizer


def test_a_few_shot_prompt_is_one_user_message(chat_tokenizer: "PreTrainedTokenizerBase") -> None:
    task = make_task("arithmetic?digits=1")
    report = validate(task, chat_tokenizer, chat=True, max_prompt_tokens=None)
    content = task.observer_prompt(task.train[0], ["<pioneer's response>"])
    assert report.ok
    assert report.prompts["observer"][0] == f"<s><|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


def test_gold_answers_to_conversations_are_rewarded_as_messages(chat_tokenizer: "PreTrainedTokenizerBase") -> None:
    sums = make_task("arithmetic?digits=1")
    task = replace(
        sums,
        train=[replace(query, history=HISTORY) for query in sums.train[:2]],
        reward="tests.cory_env.sample_rewards:conversational_answer",
    )
    answers = gold_answers(task, "train")
    with RewardWorker(task.reward) as worker:
        assert reward_answers(Chain(task, chat_tokenizer, chat=True), worker, answers) == [1.0, 1.0]


def test_each_role_s_prompt_is_a_user_message_with_one_bos(
    chat_tokenizer: "PreTrainedTokenizerBase",
) -> None:
    episode = ChainEpisode(Chain(reviews(), chat_tokenizer, chat=True, system_prompt="Write a review."), QUERIES[0])
    system = "<s><|im_start|>system\nWrite a review.<|im_end|>\n<|im_start|>user\n"
    first = episode.prompt_ids()
    assert chat_tokenizer.decode(first) == f"{system}This movie was<|im_end|>\n<|im_start|>assistant\n"
    assert first.count(chat_tokenizer.bos_token_id) == 1
    messages = [{"role": "system", "content": "Write a review."}, {"role": "user", "content": "This movie was"}]
    assert chat_tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] == first
    episode.respond(response(" fun"))
    later = 'I can make this sentence "This movie was fun" more positive: This movie was'
    assert chat_tokenizer.decode(episode.prompt_ids()) == f"{system}{later}<|im_end|>\n<|im_start|>assistant\n"


def test_without_chat_a_prompt_is_plain_text_even_if_there_is_a_template(
    chat_tokenizer: "PreTrainedTokenizerBase",
) -> None:
    assert (
        chat_tokenizer.decode(ChainEpisode(Chain(reviews(), chat_tokenizer, chat=False), QUERIES[0]).prompt_ids())
        == "<s>This movie was"
    )


def test_truncating_a_reference_leaves_the_template_intact(chat_tokenizer: "PreTrainedTokenizerBase") -> None:
    full = ChainEpisode(Chain(reviews(), chat_tokenizer, chat=True), QUERIES[0])
    words = response(" one two three four five six")
    full.respond(words)
    truncated = ChainEpisode(
        Chain(reviews(), chat_tokenizer, chat=True, max_prompt_tokens=len(full.prompt_ids()) - 2), QUERIES[0]
    )
    truncated.respond(words)
    text = chat_tokenizer.decode(truncated.prompt_ids())
    assert truncated.prompt().is_truncated and "six" not in text
    assert text.startswith("<s><|im_start|>user\n") and text.endswith("was<|im_end|>\n<|im_start|>assistant\n")


def test_chat_requires_a_template_and_system_prompt_its_support(
    chat_tokenizer: "PreTrainedTokenizerBase",
) -> None:
    with pytest.raises(ChatError, match=r"no chat template, but chat is on\. Set chat=false"):
        Chain(reviews(), tokenizer(), chat=True)
    chat_tokenizer.chat_template = NO_SYSTEM + TEMPLATE
    try:
        Chain(reviews(), chat_tokenizer, chat=True)
        with pytest.raises(
            ChatError, match=r"messages of the roles system, user: System role not supported.*setting `system_prompt`"
        ):
            Chain(reviews(), chat_tokenizer, chat=True, system_prompt="Be brief.")
    finally:
        chat_tokenizer.chat_template = TEMPLATE


def conversations(reward: str = LENGTH) -> Task:
    return Task(name="talk", train=[Query(0, "Name a fruit.", history=HISTORY)], test=[Query(0, "Why?")], reward=reward)


def test_a_conversation_keeps_its_history_and_system_message(chat_tokenizer: "PreTrainedTokenizerBase") -> None:
    episode = ChainEpisode(
        Chain(conversations(), chat_tokenizer, chat=True, system_prompt="Unused."), conversations().train[0]
    )
    text = "<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    text += "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\n"
    assert chat_tokenizer.decode(episode.prompt_ids()) == f"{text}Name a fruit.<|im_end|>\n<|im_start|>assistant\n"
    episode.respond(response("Fig"))
    assert chat_tokenizer.decode(episode.prompt_ids()).startswith(f"{text}Reference: Fig\nName a fruit.<|im_end|>")


def test_a_conversation_without_chat_is_rejected() -> None:
    with pytest.raises(ChatError, match=r"Query 0 of task talk is a conversation, but chat is off: 'Name a fruit\.'"):
        Chain(conversations(), tokenizer())


def test_rewards_of_conversations_get_messages_as_in_trl(chat_tokenizer: "PreTrainedTokenizerBase") -> None:
    task = conversations("tests.cory_env.sample_rewards:conversational")
    chain = Chain(task, chat_tokenizer, num_agents=1, chat=True)
    episode = ChainEpisode(chain, task.train[0])
    episode.respond(response("An apple"))
    with RewardWorker(task.reward, timeout=20) as worker:
        assert reward_episodes(worker, [episode]) == [[len("An apple") + 100 * 4]]


def test_validate_shows_rendered_prompts(chat_tokenizer: "PreTrainedTokenizerBase") -> None:
    report = validate(reviews(), chat_tokenizer, chat=True, system_prompt="Be kind.")
    assert report.ok
    assert report.prompts["pioneer"][0].endswith("This movie was<|im_end|>\n<|im_start|>assistant\n")
    assert "Be kind." in report.prompts["observer"][0]


def test_every_stop_token_ends_a_response_and_is_not_in_the_text() -> None:
    ordinary = tokenizer()("!")["input_ids"][0]  # not special, so decoding alone would show it
    chain = Chain(reviews(), tokenizer(), num_agents=1, stop_token_ids=[ordinary, tokenizer().eos_token_id])
    assert chain.encoders[0].stop_token_ids == (tokenizer().eos_token_id, ordinary)
    for stop in chain.encoders[0].stop_token_ids:
        episode = ChainEpisode(chain, QUERIES[0])
        words = response(" good")["tokens"]
        episode.respond({"tokens": [*words, stop, *words], "length": 2 * len(words) + 1})
        assert episode.responses == [[*words, stop]] and episode.completions == [" good"]


def test_the_environment_supports_chat_stop_tokens_and_query_truncation(
    chat_tokenizer: "PreTrainedTokenizerBase", tmp_path: Path
) -> None:
    data = tmp_path / "rows.csv"
    data.write_text("query\nThis movie was the best of all that I have seen this year\nI did not like it at all\n")
    env = cory_v0.env(
        "imdb",
        tokenizer=chat_tokenizer,
        chat=True,
        stop_token_ids=[5],
        data=data,
        reward=LENGTH,
        min_query_tokens=2,
        max_query_tokens=3,
    )
    env.reset(seed=0)
    observation = env.observe("pioneer")
    text = chat_tokenizer.decode(observation["tokens"][: observation["length"]])
    assert text.startswith("<s><|im_start|>user\nThis movie") and "best" not in text
    assert env.chain.encoders[0].stop_token_ids == (chat_tokenizer.eos_token_id, 5)
    env.close()
