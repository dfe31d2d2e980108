"""`cory serve` with a model that thinks: the thought in vLLM's field `reasoning`, and `chat_template_kwargs`."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from cory_env.chain_settings import Thinking
from launch.commands.generate import print_answer
from launch.models.generators import load_generator
from launch.models.trained import PolicySet, open_trained
from launch.models.trained_chain import TrainedChain
from launch.serving.batches import BatchRunner
from tests.launch.conftest import RUN_SETTINGS, record_test_run, write_policies
from tests.launch.serving.test_server import CHAIN, QUERY, make_model, running_server, user
from tests.thinking_model import TAGS, save_thinking_model

openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> PolicySet:
    """Policies that think."""
    folder = tmp_path_factory.mktemp("thinking")
    changes = {"model": save_thinking_model(folder / "model"), "chat": True, "thinking": Thinking(*TAGS)}
    settings = RUN_SETTINGS.model_copy(update=changes | {"max_response_tokens": 16})
    run = record_test_run(folder / "run", settings, updates=range(2))
    run.checkpoints.save(1, lambda path: write_policies(path, settings, seed=1))
    run.unlock()
    return open_trained(run.path)


@pytest.fixture(scope="module")
def client(trained: PolicySet) -> Iterator[Any]:
    runner = BatchRunner(load_generator(trained, CHAIN, "transformers", 8), None, 8)
    plain = replace(trained, settings=trained.settings.model_copy(update={"chat": False, "thinking": None}))
    models = {
        "llm_1": make_model(trained, "llm_1"),
        "plain": make_model(plain, "llm_1"),
        "chain": make_model(trained, *CHAIN),
    }
    with running_server(runner, models) as running_client:
        yield running_client


def ask(client: Any, model: str = "llm_1", **parameters: Any) -> Any:
    return client.chat.completions.create(model=model, messages=user(), temperature=0, **parameters)


def test_a_message_has_the_thought_as_reasoning_and_the_text_after_it_as_content(
    client: Any, trained: PolicySet
) -> None:
    (expected,) = TrainedChain(trained, ("llm_1",), 0, 0).answer(0, QUERY)["responses"]
    message = ask(client).choices[0].message
    assert (message.content, message.reasoning) == (expected["text"], expected["reasoning"])
    assert message.content and message.reasoning and TAGS[1] not in message.reasoning
    raw = client.completions.create(
        model="plain", prompt=f"<|user|>{QUERY}\n<|assistant|><think>\n", temperature=0
    ).choices[0]
    assert not hasattr(raw, "reasoning")
    assert raw.text == message.reasoning + message.content.replace(TAGS[1], "")  # decoding drops tags


def test_a_streamed_message_and_its_drafts_have_their_thoughts(client: Any) -> None:
    complete = ask(client, "chain").choices[0].message
    (chunk,) = ask(client, "chain", stream=True)
    delta = chunk.choices[0].delta
    assert (delta.content, delta.reasoning, delta.drafts) == (complete.content, complete.reasoning, complete.drafts)
    assert complete.drafts[0]["reasoning"] and TAGS[0] not in complete.drafts[0]["content"]


def test_a_thought_that_was_cut_off_has_no_content_and_a_stop_text_ends_only_the_content(client: Any) -> None:
    complete = ask(client).choices[0].message
    (choice,) = ask(client, max_tokens=1).choices
    assert choice.message.content is None and choice.finish_reason == "length"
    assert complete.reasoning.startswith(choice.message.reasoning)
    stop = complete.content[3:5]
    message = ask(client, stop=[stop, complete.reasoning[:1] + "\0"]).choices[0].message
    assert (message.content, message.reasoning) == (complete.content.partition(stop)[0], complete.reasoning)


def test_a_request_s_template_arguments_take_precedence(client: Any) -> None:
    thinking = ask(client).choices[0].message
    direct = ask(client, extra_body={"chat_template_kwargs": {"enable_thinking": False}}).choices[0].message
    assert direct.content and not hasattr(direct, "reasoning") and direct.content != thinking.content
    assert ask(client).choices[0].message.content == thinking.content  # only for that request
    with pytest.raises(openai.BadRequestError, match="chat_template_kwargs has 'enable_thinkin', which"):
        ask(client, extra_body={"chat_template_kwargs": {"enable_thinkin": False}})
    with pytest.raises(openai.BadRequestError, match="chat=false"):
        ask(client, "plain", extra_body={"chat_template_kwargs": {"enable_thinking": False}})


def test_generate_prints_the_thought_before_the_text(trained: PolicySet, capsys: pytest.CaptureFixture[str]) -> None:
    answer = TrainedChain(trained, CHAIN, 0, 0).answer(0, QUERY)
    print_answer(answer, print_query=False)
    assert capsys.readouterr().out == "".join(
        f"{response['role']} ({response['policy']}): {response['reasoning'].strip()}\n\n{response['text'].lstrip()}\n"
        for response in answer["responses"]
    )
