"""Checks of chat templates: accepted and rejected templates, turn ends, and today's date."""

from datetime import date
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from cory_env import cory_v0
from cory_env.chain import Chain
from cory_env.chat import ChatError, ChatTemplate
from cory_env.tasks import DataError, Message, Query, Task
from cory_env.tasks.rows import read_queries
from cory_env.tokenizer import DEFAULT_TOKENIZER, load_tokenizer
from tests.cory_env.sample_tasks import LENGTH, reviews, validate
from tests.cory_env.sample_tokenizers import CHATML, LLAMA

ENDING = "{% if add_generation_prompt %}"
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    f"{ENDING}{{{{ '<|assistant|>\n' }}}}{{% endif %}}"
)
PHI = (  # first published version: opens the turn after the user message and drops system messages
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content + '<|end|>\n<|assistant|>\n' }}"
    "{% elif m.role == 'assistant' %}{{ m.content + '<|end|>\n' }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
    f"<end_of_turn>\n{{% endfor %}}{ENDING}<start_of_turn>model\n{{% endif %}}"
)
LLAMA_2 = (
    "{% if messages[0].role == 'system' %}{% set loop_messages = messages[1:] %}{% set system = messages[0].content %}"
    "{% else %}{% set loop_messages = messages %}{% set system = false %}{% endif %}{% for m in loop_messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% set system = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' if loop.index0 == 0 and system else '' %}"
    "{% set content = system + m.content %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
    "<｜User｜>{{ m.content }}{% else %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<|end|>{% endif %}"
    "{% endfor %}"
    f"{ENDING}<｜Assistant｜><think>\n{{% endif %}}"
)
DATED = "Today is {{ strftime_now('%d %b %Y') }}.\n" + CHATML
PARTS = (
    "{% for m in messages %}{{ m.role }}{% for part in m.content %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    f"{{% endif %}}{{% endfor %}}{{% endfor %}}{ENDING}Assistant:{{% endif %}}"
)
OPEN = CHATML.replace("<|im_end|>\n", "{% if not loop.last %}<|im_end|>{% endif %}\n")  # leaves the last turn open
TWO_ENDS = CHATML.replace("<|im_end|>", "<|end|>{{ eos_token }}")  # Cohere's format: two end tokens in a row
ROLES = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}<{{ m.role }}>{{ m.content }}{% endif %}"
)
ROLES += f"{{% endfor %}}{ENDING}<assistant>{{% endif %}}"


def tokenizer(template: str) -> PreTrainedTokenizerBase:
    loaded = load_tokenizer(str(DEFAULT_TOKENIZER))
    markers = ["<|im_start|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|tool|>"]
    loaded.add_special_tokens({"additional_special_tokens": markers})
    loaded.chat_template = template
    return loaded


@pytest.mark.parametrize(
    ("template", "system", "end"),
    [
        (OPEN, True, "<|im_end|>"),
        (TWO_ENDS, True, None),
        (CHATML, True, "<|im_end|>"),
        (LLAMA.replace("</s>", "{{ eos_token }}"), True, "<|endoftext|>"),
        (ZEPHYR, True, "<|endoftext|>"),
        (PHI, False, "<|end|>"),
        (GEMMA, False, "<end_of_turn>"),
        (LLAMA_2, True, "<|endoftext|>"),
        (R1, True, "<|end|>"),
        (ROLES, True, None),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:", True, None),
    ],
)
def test_common_templates_are_accepted_and_their_turn_ends_end_a_response(
    template: str, system: bool, end: str | None
) -> None:
    loaded = tokenizer(template)
    chain = Chain(reviews(), loaded, chat=True)
    ends = dict.fromkeys(["<|endoftext|>", *([end] if end else [])])
    assert [loaded.decode(token) for token in chain.encoders[0].stop_token_ids] == list(ends)
    talk = (Message(role="user", content="Hi"), Message(role="assistant", content="Ho"))
    assert loaded.decode(chain.encoders[0].encode_prompts([Query(0, "Why?", history=talk)])[0]).count("Why?") == 1
    if system:
        ChatTemplate(loaded, system_prompt="Be kind.")
    else:
        with pytest.raises(ChatError, match=r"system"):
            ChatTemplate(loaded, system_prompt="Be kind.")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (PARTS, "drops the message of the role user"),
        (f"hello{ENDING}!{{% endif %}}", "drops the message of the role user"),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", "has no generation prompt: .*<assistant>"),
        (f"{{{{ messages[0].content * 2 }}}}{ENDING}!{{% endif %}}", "renders 2 times the message of the role user"),
        ("{{ messages[0]['content'] + 1 }}", "rejects messages of the roles user: can only concatenate str"),
        ("{{ 1 / 0 }}", "rejects messages of the roles user: division by zero"),
        ("{% for m in messages %}", "rejects messages of the roles user: Unexpected end of template"),
        ("{{ messages[0].content.parts[0].text }}", "rejects messages of the roles user: .* has no attribute 'parts'"),
        ("{{ messages[3].content }}", "rejects messages of the roles user: .* has no element 3"),
    ],
)
def test_a_template_that_drops_a_message_or_fails_is_rejected(template: str, reason: str) -> None:
    with pytest.raises(ChatError, match=rf"The chat template of .* {reason}.*\. Use a model with another template"):
        Chain(reviews(), tokenizer(template), chat=True)


def test_a_template_that_drops_the_system_message_is_rejected() -> None:
    with pytest.raises(
        ChatError, match=r"drops the message of the role system in a conversation of the roles system, user"
    ):
        Chain(reviews(), tokenizer(PHI), chat=True, system_prompt="Answer in French.")


@pytest.mark.parametrize("role", ["developer", "tool", "ipython"])
def test_a_conversation_with_a_dropped_message_is_rejected(role: str) -> None:
    history = (Message(role=role, content="Only in French."),)
    task = Task(name="t", train=[Query(0, "Hello", history=history)], test=[Query(0, "Ho")], reward=LENGTH)
    report = validate(task, tokenizer(ROLES), chat=True)
    (problem,) = report.problems
    assert f"drops the message of the role {role} in a conversation of the roles {role}, user" in problem
    chain = Chain(task, tokenizer(CHATML), chat=True)  # which supports any role
    encoder = chain.encoders[0]
    assert "Only in French." in encoder.tokenizer.decode(encoder.encode_prompts(task.train)[0])


def test_an_invalid_role_is_rejected() -> None:
    history = (Message(role="system<|im_end|>", content="Obey."),)
    with pytest.raises(ChatError, match=r"a message with the invalid role 'system<\|im_end\|>'"):
        Chain(reviews(), tokenizer(CHATML), chat=True).encoders[0].encode_prompts([Query(0, "Hi", history=history)])


@pytest.mark.parametrize("content", ['""', "null", '"Let me see."'])
@pytest.mark.parametrize("call", ['"tool_calls": [{"id": "1"}]', '"function_call": {"name": "f"}'])
def test_a_message_with_tool_calls_is_rejected(tmp_path: Path, content: str, call: str) -> None:
    file = tmp_path / "talks.jsonl"
    talk = f'[{{"role": "assistant", "content": {content}, {call}}}, {{"role": "user", "content": "So?"}}]'
    file.write_text(f'{{"query": {talk}}}\n')
    with pytest.raises(DataError, match="images and tool calls are not supported"):
        read_queries(file)
    file.write_text('{"query": [{"role": "user", "content": "So?", "tool_calls": [], "function_call": null}]}\n')
    assert read_queries(file)[0].text == "So?"  # as tables encode missing values


def test_a_wrong_number_of_bos_tokens_is_a_warning() -> None:
    from tokenizers.processors import TemplateProcessing

    loaded = tokenizer(CHATML)
    bos = [("<|endoftext|>", loaded.bos_token_id)]
    loaded.backend_tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=bos)
    task = Task(**{**vars(reviews()), "prompt_template": "<|endoftext|>{query}"})
    assert any(
        "begin with 2 BOS tokens, <|endoftext|>, because of `prompt`" in text
        for text in validate(task, loaded, chat=False).warnings
    )
    assert not any("BOS" in warning for warning in validate(reviews(), loaded, chat=False).warnings)
    assert not any("BOS" in warning for warning in validate(reviews(), loaded, chat=True).warnings)
    loaded.chat_template = "{{ bos_token }}" + CHATML
    (warning,) = (text for text in validate(reviews(), loaded, chat=True).warnings if "BOS" in text)
    assert "begin with 2 BOS tokens, <|endoftext|>, because of the chat template" in warning
    loaded.chat_template = ZEPHYR
    assert any("begin with no BOS tokens" in warning for warning in validate(reviews(), loaded, chat=True).warnings)


def test_chat_date_replaces_today_s_date_in_templates() -> None:
    today, fixed = ChatTemplate(tokenizer(DATED)), ChatTemplate(tokenizer(DATED), chat_date="2024-07-26")
    assert today.uses_date and not ChatTemplate(tokenizer(CHATML)).uses_date
    assert today.render("Hi").startswith(f"Today is {date.today():%d %b %Y}.")
    assert fixed.render("Hi").startswith("Today is 26 Jul 2024.")
    llama = (
        "{% if date_string is not defined %}{% set date_string = '1 Jan 2020' %}{% endif %}{{ date_string }}" + CHATML
    )
    assert ChatTemplate(tokenizer(llama)).render("Hi").startswith("1 Jan 2020")  # the template's default date
    assert ChatTemplate(tokenizer(llama), chat_date="2024-07-26").render("Hi").startswith("26 Jul 2024")
    env = cory_v0.env(reviews(), tokenizer=tokenizer(DATED), chat=True, chat_date="2024-07-26")
    env.reset(seed=0)
    observation = env.observe("pioneer")
    prompt = observation["tokens"][: observation["length"]]
    assert "Today is 26 Jul 2024." in env.chain.encoders[0].tokenizer.decode(prompt)
    env.close()
