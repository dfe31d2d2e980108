"""Arguments of chat templates (`chat_template_kwargs`)."""

import pytest

from cory_env.chain import Chain
from cory_env.chat import ChatError, ChatTemplate, template_variables
from cory_env.tasks import Query
from cory_env.tokenizer import DEFAULT_TOKENIZER, load_tokenizer
from tests.cory_env.sample_tasks import QUERIES, reviews

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% if level %}{{ level }}{% endif %}{% endif %}"
)


def template(**arguments: object) -> ChatTemplate:
    tokenizer = load_tokenizer(str(DEFAULT_TOKENIZER))
    tokenizer.chat_template = TEMPLATE
    return ChatTemplate(tokenizer, arguments=arguments)


def test_arguments_reach_the_template() -> None:
    assert template().render("Hi") == "<|user|>Hi<|assistant|>"
    assert template(enable_thinking=False).render("Hi") == "<|user|>Hi<|assistant|><think>\n\n</think>\n\n"
    assert template(enable_thinking=True, level="high").render("Hi") == "<|user|>Hi<|assistant|>high"


@pytest.mark.parametrize("name", ["enable_thinkin", "tools", "messages", "add_generation_prompt", "tokenize", "m"])
def test_an_argument_that_the_template_does_not_read_is_an_error(name: str) -> None:
    message = rf"chat_template_kwargs has '{name}', which .* does not read\. It reads: enable_thinking, level\.$"
    with pytest.raises(ChatError, match=message):
        template(**{name: False})


def test_the_variables_of_templates_as_transformers_writes_them_are_found() -> None:
    text = (
        "{%- set first = messages[0] %}{%- for m in messages %}{%- if loop.first %}{%- continue %}{%- endif %}"
        "{% generation %}{{ m.content | tojson }}{{ inner }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') }}"
        "{%- macro show(value) %}{{ value }}{{ outer }}{% endmacro %}{{ raise_exception('no') }}{{ namespace(a=1).a }}"
    )
    assert template_variables(text) == {"messages", "inner", "outer", "strftime_now", "raise_exception"}
    with pytest.raises(ChatError, match="not valid"):
        template_variables("{% for %}")


def test_a_chain_with_a_request_s_arguments_keeps_its_other_ones() -> None:
    tokenizer, other = load_tokenizer(str(DEFAULT_TOKENIZER)), load_tokenizer(str(DEFAULT_TOKENIZER))
    tokenizer.chat_template = TEMPLATE
    other.chat_template = TEMPLATE.replace("<|", "[").replace("|>", "]")
    arguments = {"enable_thinking": False}
    one, two = (
        Chain(reviews(), model, num_agents=2, chat=True, chat_template_kwargs=arguments) for model in (tokenizer, other)
    )
    chain = one.with_encoders([one.encoders[0], two.encoders[0]]).with_chat_template_kwargs(
        {"level": "low", "enable_thinking": True}
    )
    prompts = [encoder.encode_prompts([Query(0, "Hi")])[0] for encoder in chain.encoders]
    texts = [tokenizer.decode(prompt) for prompt in prompts]
    assert texts == ["<|user|>Hi<|assistant|>low", "[user]Hi[assistant]low"]
    assert tokenizer.decode(one.encoders[0].encode_prompts([Query(0, "Hi")])[0]).endswith("</think>\n\n")  # unchanged
    extended = one.with_chat_template_kwargs({"level": "low"})
    assert tokenizer.decode(extended.encoders[0].encode_prompts(QUERIES[:1])[0]).endswith("</think>\n\nlow")
    assert extended.encoders[0] is extended.encoders[1] is not one.encoders[0]
    with pytest.raises(ChatError, match="chat=false"):
        Chain(reviews(), tokenizer, chat=False).with_chat_template_kwargs({"level": "low"})
