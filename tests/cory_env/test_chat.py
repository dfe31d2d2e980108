"""Prompts in a chat template, conversations, and models whose responses may end with one of several tokens."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cory_env import cory_v0
from cory_env.chain import Chain
from cory_env.chat import ChatError
from cory_env.episode import ChainEpisode
from cory_env.rewarding.episodes import reward_episodes
from cory_env.rewarding.worker import RewardWorker
from cory_env.tasks import Message, Query, Task, make_task
from cory_env.tokenizer import DEFAULT_TOKENIZER, load_tokenizer
from cory_env.validate import gold_answers, reward_answers, validate
from tests.cory_env.sample_tasks import LENGTH, QUERIES, response, reviews, tokenizer

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
def chatty() -> "PreTrainedTokenizerBase":
    """A tokenizer as instruction-tuned models have them: its template writes the BOS that it would add itself too."""
    from tokenizers.processors import TemplateProcessing

    chatty = load_tokenizer(str(DEFAULT_TOKENIZER))
    chatty.add_special_tokens(
        {"bos_token": "<s>", "eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    )
    chatty.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", chatty.bos_token_id)]
    )
    chatty.chat_template = TEMPLATE
    assert chatty("a")["input_ids"][0] == chatty.bos_token_id
    return chatty


def test_a_few_shot_prompt_is_one_message_of_the_user_s(chatty: "PreTrainedTokenizerBase") -> None:
    task = make_task("arithmetic", digits=1)
    report = validate(task, chatty, chat=True, max_prompt_tokens=None)
    asked = task.observer_prompt(task.train[0], ["<pioneer's response>"])
    assert report.ok
    assert report.prompts["observer"][0] == f"<s><|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"


def test_gold_answers_to_conversations_are_messages_as_in_training(chatty: "PreTrainedTokenizerBase") -> None:
    sums = make_task("arithmetic", digits=1)
    task = replace(
        sums,
        train=[replace(query, history=HISTORY) for query in sums.train[:2]],
        reward="tests.cory_env.sample_rewards:conversational_answer",
    )
    answers = gold_answers(task, "train")
    with RewardWorker(task.reward) as worker:
        assert reward_answers(Chain(task, chatty, chat=True), worker, answers) == [1.0, 1.0]


def test_each_role_s_prompt_is_a_user_s_message_and_special_tokens_stand_once(
    chatty: "PreTrainedTokenizerBase",
) -> None:
    episode = ChainEpisode(Chain(reviews(), chatty, chat=True, system_prompt="Write a review."), QUERIES[0])
    system = "<s><|im_start|>system\nWrite a review.<|im_end|>\n<|im_start|>user\n"
    first = episode.prompt_ids()
    assert chatty.decode(first) == f"{system}This movie was<|im_end|>\n<|im_start|>assistant\n"
    assert first.count(chatty.bos_token_id) == 1
    messages = [{"role": "system", "content": "Write a review."}, {"role": "user", "content": "This movie was"}]
    assert chatty.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] == first
    episode.respond(response(" fun"))
    later = 'I can make this sentence "This movie was fun" more positive: This movie was'
    assert chatty.decode(episode.prompt_ids()) == f"{system}{later}<|im_end|>\n<|im_start|>assistant\n"


def test_without_chat_a_prompt_is_plain_text_even_where_there_is_a_template(chatty: "PreTrainedTokenizerBase") -> None:
    assert chatty.decode(ChainEpisode(Chain(reviews(), chatty), QUERIES[0]).prompt_ids()) == "<s>This movie was"


def test_a_reference_is_cut_inside_the_template_which_stays_whole(chatty: "PreTrainedTokenizerBase") -> None:
    whole = ChainEpisode(Chain(reviews(), chatty, chat=True), QUERIES[0])
    words = response(" one two three four five six")
    whole.respond(words)
    cut = ChainEpisode(Chain(reviews(), chatty, chat=True, max_prompt_tokens=len(whole.prompt_ids()) - 2), QUERIES[0])
    cut.respond(words)
    text = chatty.decode(cut.prompt_ids())
    assert cut.truncated == [False, True] and "six" not in text
    assert text.startswith("<s><|im_start|>user\n") and text.endswith("was<|im_end|>\n<|im_start|>assistant\n")


def test_a_tokenizer_without_a_template_and_one_that_takes_no_system_message_are_refused(
    chatty: "PreTrainedTokenizerBase",
) -> None:
    with pytest.raises(ChatError, match=r"no chat template, but chat is on\. Set chat=false"):
        Chain(reviews(), tokenizer(), chat=True)
    chatty.chat_template = NO_SYSTEM + TEMPLATE
    try:
        Chain(reviews(), chatty, chat=True)
        with pytest.raises(
            ChatError, match=r"messages from system, user: System role not supported.*setting `system_prompt`"
        ):
            Chain(reviews(), chatty, chat=True, system_prompt="Be brief.")
    finally:
        chatty.chat_template = TEMPLATE


def conversations(reward: str = LENGTH) -> Task:
    return Task(name="talk", train=[Query(0, "Name a fruit.", history=HISTORY)], test=[Query(0, "Why?")], reward=reward)


def test_a_conversation_keeps_its_history_and_its_own_system_message(chatty: "PreTrainedTokenizerBase") -> None:
    episode = ChainEpisode(Chain(conversations(), chatty, chat=True, system_prompt="Unused."), conversations().train[0])
    text = "<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    text += "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\n"
    assert chatty.decode(episode.prompt_ids()) == f"{text}Name a fruit.<|im_end|>\n<|im_start|>assistant\n"
    episode.respond(response("Fig"))
    assert chatty.decode(episode.prompt_ids()).startswith(f"{text}Reference: Fig\nName a fruit.<|im_end|>")


def test_a_conversation_without_chat_is_refused() -> None:
    with pytest.raises(ChatError, match=r"Query 0 of task talk is a conversation, but chat is off: 'Name a fruit\.'"):
        Chain(conversations(), tokenizer())


def test_a_conversation_s_reward_gets_messages_as_trl_gives_them(chatty: "PreTrainedTokenizerBase") -> None:
    task = conversations("tests.cory_env.sample_rewards:conversational")
    chain = Chain(task, chatty, num_agents=1, chat=True)
    episode = ChainEpisode(chain, task.train[0])
    episode.respond(response("An apple"))
    with RewardWorker(task.reward, timeout=20) as worker:
        assert reward_episodes(worker, [episode]) == [[len("An apple") + 100 * 4]]


def test_validate_shows_the_prompts_as_the_model_gets_them(chatty: "PreTrainedTokenizerBase") -> None:
    report = validate(reviews(), chatty, chat=True, system_prompt="Be kind.")
    assert report.ok
    assert report.prompts["pioneer"][0].endswith("This movie was<|im_end|>\n<|im_start|>assistant\n")
    assert "Be kind." in report.prompts["observer"][0]


def test_every_stop_token_ends_a_response_and_none_shows_in_the_text() -> None:
    plain = tokenizer()("!")["input_ids"][0]  # not a special token: decoding alone would show it
    chain = Chain(reviews(), tokenizer(), num_agents=1, stop_token_ids=[plain, tokenizer().eos_token_id])
    assert chain.stop_token_ids == (tokenizer().eos_token_id, plain)
    for stop in chain.stop_token_ids:
        episode = ChainEpisode(chain, QUERIES[0])
        words = response(" good")["tokens"]
        episode.respond({"tokens": [*words, stop, *words], "length": 2 * len(words) + 1})
        assert episode.responses == [[*words, stop]] and episode.completions == [" good"]


def test_the_environment_takes_chat_stop_tokens_and_cut_queries(
    chatty: "PreTrainedTokenizerBase", tmp_path: Path
) -> None:
    data = tmp_path / "rows.csv"
    data.write_text("query\nThis movie was the best of all that I have seen this year\nI did not like it at all\n")
    env = cory_v0.env(
        "imdb",
        tokenizer=chatty,
        chat=True,
        stop_token_ids=[5],
        data=data,
        reward=LENGTH,
        min_query_tokens=2,
        max_query_tokens=3,
    )
    env.reset(seed=0)
    seen = env.observe("pioneer")
    text = chatty.decode(seen["tokens"][: seen["length"]])
    assert text.startswith("<s><|im_start|>user\nThis movie") and "best" not in text
    assert env.chain.stop_token_ids == (chatty.eos_token_id, 5)
    env.close()
