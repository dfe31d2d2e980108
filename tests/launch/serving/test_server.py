"""`cory serve` as OpenAI's own client sees it: the answers of `cory generate`, drafts, streams, and errors."""

import http.client
import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from cory_env.chain import Chain
from cory_env.chat import ChatError
from cory_env.tasks import Query, Task
from cory_env.tokenizer import load_tokenizer
from launch.main import main
from launch.models.generators import load_generator
from launch.models.trained import PolicySet, open_trained
from launch.models.trained_chain import TokenPrinter, TrainedChain, chain_of
from launch.run_folder.run import Run
from launch.serving import server
from launch.serving.backends import make_backend
from launch.serving.protocol import ChatRequest, RequestError, openai_error
from launch.serving.request_queue import RequestQueue
from launch.serving.responses import ServedModel
from policies.generation.installed import vllm_installed
from policies.generation.token_stream import WINDOW, Detokenizer
from tests.launch.conftest import ENVIRONMENT, begin

openai = pytest.importorskip("openai")

QUERY = "This movie"
CHAIN = ("llm_2", "llm_1")
KEY = "secret"


def stopping(trained: PolicySet) -> PolicySet:
    """The same policies, of a run whose responses end at an `o`."""
    return replace(trained, settings=trained.settings.model_copy(update={"stop": "o"}))


def client(address: str, key: str = KEY) -> Any:
    return openai.OpenAI(base_url=address, api_key=key, max_retries=0, timeout=100)


@pytest.fixture(scope="module")
def asked(policies_run: Run) -> Iterator[Any]:
    """A client of a server in this process, of the run's best checkpoint, by transformers."""
    trained = open_trained(policies_run.path)
    queue = RequestQueue(make_backend(load_generator(trained, CHAIN, "transformers", 8), CHAIN, 8))
    models = {policy: ServedModel(policy, (policy,), chain_of(trained, [policy])) for policy in CHAIN}
    models["chain"] = ServedModel("chain", CHAIN, chain_of(trained, CHAIN))
    models["stopping"] = ServedModel("stopping", ("llm_1",), chain_of(stopping(trained), ["llm_1"]))
    sock = socket.create_server(("127.0.0.1", 0))
    app = server.make_app(queue, models, 0.7, KEY)
    http_server = uvicorn.Server(uvicorn.Config(app, log_config=None, log_level="error"))
    thread = threading.Thread(target=http_server.run, args=([sock],))
    thread.start()
    yield client(f"http://127.0.0.1:{sock.getsockname()[1]}/v1")
    http_server.should_exit = True
    thread.join()
    queue.close()


def answers(run: Run, policy_ids: tuple[str, ...], temperature: float, seed: int = 0, count: int = 1) -> list[Any]:
    """What `cory generate` answers to the query, as so many queries."""
    chain = TrainedChain(open_trained(run.path), policy_ids, temperature, seed)
    return [[each["text"] for each in chain.answer(number, QUERY)["responses"]] for number in range(count)]


def user(text: str = QUERY) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_the_policies_and_their_chain_are_its_models(asked: Any) -> None:
    assert [model.id for model in asked.models.list()] == ["llm_2", "llm_1", "chain", "stopping"]
    assert asked.models.retrieve("chain").id == "chain"


def test_a_seed_brings_what_generate_answers_and_the_chain_brings_its_drafts(asked: Any, policies_run: Run) -> None:
    expected = answers(policies_run, CHAIN, 0.7, seed=3, count=2)
    reply = asked.chat.completions.create(model="chain", messages=user(), seed=3, n=2)
    for choice, (draft, answer) in zip(reply.choices, expected, strict=True):
        assert choice.message.content == answer
        assert choice.message.drafts == [{"role": "pioneer", "policy": "llm_2", "content": draft}]
    as_text = asked.completions.create(model="chain", prompt=[QUERY, QUERY], seed=3)
    assert [choice.text for choice in as_text.choices] == [answer for _, answer in expected]
    assert as_text.usage.completion_tokens == reply.usage.completion_tokens == 32


def test_a_stream_brings_the_drafts_first_and_then_the_same_answer_in_pieces(asked: Any) -> None:
    whole = asked.chat.completions.create(model="chain", messages=user(), seed=5)
    options = {"include_usage": True}
    chunks = list(
        asked.chat.completions.create(model="chain", messages=user(), seed=5, stream=True, stream_options=options)
    )
    assert chunks[0].choices[0].delta.drafts == whole.choices[0].message.drafts
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content and sum(map(bool, pieces)) > 3
    assert chunks[-2].choices[0].finish_reason == "length" and chunks[-1].usage == whole.usage


def test_a_policy_goes_on_from_a_text_and_ends_before_a_stop_text(asked: Any, policies_run: Run) -> None:
    ((text,),) = answers(policies_run, ("llm_1",), 0)
    (choice,) = asked.completions.create(model="llm_1", prompt=QUERY, temperature=0).choices
    assert (choice.text, choice.finish_reason) == (text, "length") and not hasattr(choice, "drafts")
    stop = text[5:9]
    (choice,) = asked.completions.create(model="llm_1", prompt=QUERY, temperature=0, stop=stop).choices
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
    (choice,) = asked.completions.create(model="llm_1", prompt=QUERY, temperature=0, max_tokens=2).choices
    assert text.startswith(choice.text) and len(choice.text) < len(text)


def test_a_run_s_own_stop_text_ends_an_answer_as_generate_shows_it(asked: Any, policies_run: Run) -> None:
    ((whole,),) = answers(policies_run, ("llm_1",), 0)
    text = whole.partition("o")[0]
    assert "o" in whole and not text.endswith(" ")  # the token that holds the `o` brings text before it
    told = io.StringIO()
    chain = TrainedChain(stopping(open_trained(policies_run.path)), ("llm_1",), 0, 0)
    answered = chain.answer(0, QUERY, TokenPrinter(told, repeat=False))
    assert answered["responses"][0]["text"] == text and told.getvalue() == f"pioneer (llm_1): {text.lstrip()}\n"
    ask: dict[str, Any] = {"model": "stopping", "temperature": 0}
    for stops in ("~", ["~", "o", "oo"]):
        (choice,) = asked.completions.create(prompt=QUERY, stop=stops, **ask).choices
        assert (choice.text, choice.finish_reason) == (text, "stop")
        (choice,) = asked.chat.completions.create(messages=user(), stop=stops, **ask).choices
        assert (choice.message.content, choice.finish_reason) == (text, "stop")
        chunks = asked.completions.create(prompt=QUERY, stop=stops, stream=True, **ask)
        assert "".join(choice.text or "" for chunk in chunks for choice in chunk.choices) == text


def test_clients_at_once_get_what_each_gets_alone(asked: Any) -> None:
    seeds = range(6)

    def ask(seed: int) -> str:
        return str(asked.completions.create(model=CHAIN[seed % 2], prompt=QUERY, seed=seed).choices[0].text)

    together: dict[int, str] = {}
    threads = [threading.Thread(target=lambda seed=seed: together.update({seed: ask(seed)})) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == {seed: ask(seed) for seed in seeds}


@pytest.mark.parametrize(
    ("fields", "status", "code", "said"),
    [
        ({"model": "llm_7"}, 404, "model_not_found", "This server has: llm_2, llm_1, chain, stopping."),
        ({"messages": user("word " * 200)}, 400, "context_length_exceeded", "needs a prompt of"),
        ({"messages": [{"role": "system", "content": "Be kind."}, *user()]}, 400, None, "without a chat template"),
        ({"top_p": 0.9}, 400, "unsupported_parameter", "sampled by temperature alone"),
        ({"extra_body": {"typo": 1}}, 400, "unsupported_parameter", "typo=1 is not supported"),
        ({"temperature": -1}, 400, None, "temperature: Input should be greater than"),
        ({"temperature": 2.5}, 400, None, "temperature: Input should be less than or equal to 2"),
        ({"messages": user("")}, 400, None, "The prompt is empty."),
        ({"logprobs": True}, 400, "unsupported_parameter", "sampled by temperature alone"),
        ({"stop": 3}, 400, None, "stop: Input should be a valid list."),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None, "Input should be 'text'"),
        ({"messages": [{"role": "user", "content": None}]}, 400, None, "messages.0.content is null: send the text"),
        ({"messages": []}, 400, None, "messages: List should have at least 1 item"),
        ({"messages": user("word " * 200), "stream": True}, 400, "context_length_exceeded", "needs a prompt of"),
    ],
)
def test_what_cannot_be_answered_is_an_error_of_openai(
    asked: Any, fields: dict[str, Any], status: int, code: str | None, said: str
) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        asked.chat.completions.create(**{"model": "chain", "messages": user(), **fields})
    assert (raised.value.status_code, raised.value.code) == (status, code)
    assert said in raised.value.body["message"]


def test_completions_refuse_what_they_would_leave_out_or_could_not_read(asked: Any) -> None:
    for model, fields, said in (
        ("llm_1", {"logprobs": 0}, "logprobs=0 is not supported"),
        ("chain", {"prompt": ""}, "The prompt is empty."),
        ("llm_1", {"prompt": []}, "prompt: Value should have at least 1 item"),
        ("llm_1", {"prompt": [QUERY] * 65}, "A request may have at most 64 responses."),
        ("chain", {"prompt": [QUERY, "word " * 200], "stream": True}, "needs a prompt of"),
        ("llm_1", {"prompt": "word " * 2**18}, "413"),
    ):
        with pytest.raises(openai.APIStatusError, match=said):
            asked.completions.create(**{"model": model, "prompt": QUERY, **fields})


def test_a_body_that_is_no_json_object_is_told_as_such(asked: Any) -> None:
    for content in (b'{"model": ', b"[1]", b""):
        with pytest.raises(openai.APIStatusError, match=r"The body must be a JSON object\."):
            asked.post("/chat/completions", content=content, cast_to=object)


def test_an_empty_stop_text_ends_nothing(asked: Any) -> None:
    texts = [
        asked.completions.create(model="llm_1", prompt=QUERY, max_tokens=4, seed=1, **stop).choices[0].text
        for stop in ({}, {"stop": ""}, {"stop": [""]})
    ]
    assert texts[0] and len({*texts}) == 1


def test_what_clients_send_although_it_changes_nothing_is_taken(asked: Any) -> None:
    neutral: dict[str, Any] = {"logprobs": None, "min_p": 0, "repetition_penalty": 1.0, "suffix": None, "user": "me"}
    for endpoint, query in (("chat/completions", {"messages": user()}), ("completions", {"prompt": QUERY})):
        body = {"model": "llm_1", "max_tokens": 1, "service_tier": None, **query, **neutral}
        assert asked.post(f"/{endpoint}", body=body, cast_to=object)["choices"]


def test_a_wrong_key_is_refused_and_a_wrong_path_is_not_found(asked: Any) -> None:
    with pytest.raises(openai.AuthenticationError, match="The API key is missing or wrong"):
        client(str(asked.base_url), "other").models.list()
    connection = http.client.HTTPConnection(asked.base_url.host, asked.base_url.port, timeout=20)
    connection.request("GET", "/v1/models", headers={"Authorization": b"Bearer \xff".decode("latin1")})
    assert connection.getresponse().status == 401  # bytes that are no UTF-8
    connection.close()
    with pytest.raises(openai.NotFoundError, match="Not Found"):
        asked.embeddings.create(model="llm_1", input=QUERY)


def test_text_that_may_become_a_stop_text_is_held_back() -> None:
    writing = Detokenizer(lambda tokens: "".join(map(chr, tokens)), ["END"])
    assert [writing.add([ord(letter)]) for letter in "aENbEND"] == ["a", "", "", "ENb", "", "", ""]
    assert writing.stopped and (writing.end(), writing.text) == ("", "aENb")
    writing = Detokenizer(lambda tokens: "".join(map(chr, tokens)), ["END"])
    assert (writing.add([ord("E")]), writing.end()) == ("", "E")


def test_a_long_text_is_decoded_in_parts_and_is_the_same() -> None:
    tokenizer = load_tokenizer()
    chain = Chain(Task(name="custom", train=[], test=[], reward="r:r"), tokenizer, num_agents=1)
    tokens = tokenizer("Größe 日本語 🎬🍿 isn't  it? \n\tYes.é" * 40)["input_ids"]
    asked: list[int] = []

    def decode(part: Sequence[int]) -> str:
        asked.append(len(part))
        return chain.decode(part)

    writing = Detokenizer(decode)
    pieces = [writing.add([token]) for token in tokens]
    assert "".join([*pieces, writing.end()]) == writing.text == chain.decode(tokens) and len(tokens) > 500
    assert max(asked) < WINDOW + 4  # a character has 4 bytes, at most as many tokens


def test_what_cannot_be_served_is_one_sentence(
    policies_run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(policies_run.path), "--port", port]) == 2
    assert f"Error: Cannot listen at 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err
    assert main(["serve", str(policies_run.path), "--roles", "llm_7", "--port", "0"]) == 2
    assert "has no policy `llm_7`" in capsys.readouterr().err
    monkeypatch.delattr("launch.serving.server")
    monkeypatch.delitem(sys.modules, "launch.serving.server")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", str(policies_run.path), "--port", "0"]) == 2
    assert "needs uvicorn. Run `pip install 'cory-rllib[serve]'`." in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")
def test_ctrl_c_ends_it_while_it_loads(policies_run: Run, tmp_path: Path) -> None:
    for seconds in (1, 2, 3):  # vLLM is imported, an engine starts
        process = begin(tmp_path, "serve", str(policies_run.path), "--port", "0")
        try:
            assert process.stderr is not None
            assert "loading" in process.stderr.readline()
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=seconds)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=4) == -signal.SIGINT
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")
def test_by_vllm_it_answers_as_generate_does_and_ends_cleanly_at_sigterm(policies_run: Run, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "cory_rllib", "serve", str(policies_run.path), "--port", "0"],
        cwd=tmp_path,
        env={**ENVIRONMENT, "CORY_API_KEY": KEY},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        said = [process.stderr.readline(), process.stderr.readline()]
        found = re.search(r"Serving llm_2, llm_1, chain at (\S+) \(vllm\)", said[-1])
        assert found, said
        asked = client(found[1])
        expected = answers(policies_run, CHAIN, 0)
        reply = asked.chat.completions.create(model="chain", messages=user(), temperature=0).choices[0].message
        assert [[reply.drafts[0]["content"], reply.content]] == expected
        first, again = (asked.completions.create(model="llm_1", prompt=QUERY, seed=2, n=3) for _ in range(2))
        assert [each.text for each in first.choices] == [each.text for each in again.choices]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        assert process.stderr.read() == ""
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_run_with_chat_takes_conversations_and_any_other_a_single_message() -> None:
    tokenizer = load_tokenizer()
    tokenizer.chat_template = "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}assistant:"
    task = Task(name="custom", train=[], test=[], reward="r:r", prompt_template="Q: {query}")
    model = ServedModel("llm_1", ("llm_1",), Chain(task, tokenizer, num_agents=1, chat=True))
    said = [{"role": "developer", "content": "Be kind."}, *user("Hi"), {"role": "assistant", "content": "Ho"}, *user()]
    text, history = server.parse_conversation(ChatRequest(model="llm_1", messages=said), model)
    (prompt,) = model.chain.encode_first([Query(0, text, history=history)])
    assert tokenizer.decode(prompt) == f"system: Be kind.\nuser: Hi\nassistant: Ho\nuser: Q: {QUERY}\nassistant:"
    with pytest.raises(RequestError, match="The last message must be the user's"):
        server.parse_conversation(ChatRequest(model="llm_1", messages=said[:-1]), model)
    tokenizer.chat_template = (
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}{{ 'A:' if add_generation_prompt }}"
    )
    deaf = Chain(task, tokenizer, num_agents=1, chat=True)
    with pytest.raises(ChatError) as lost:
        deaf.encode_first([Query(0, text, history=history)])
    status, body = openai_error(lost.value)
    assert status == 400 and "leaves out the message of the role system" in body["error"]["message"]
