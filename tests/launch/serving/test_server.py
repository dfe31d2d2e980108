"""`cory serve` with OpenAI's client: the same responses as `cory generate`, drafts, streams, and errors."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
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
from launch.models.trained_chain import TrainedChain
from launch.run_folder.run import Run
from launch.serving import server
from launch.serving.batches import BatchRunner
from launch.serving.protocol import ChatRequest, RequestError, openai_error
from policies.generation.installed import vllm_installed
from tests.launch.conftest import ENVIRONMENT, start_cory

openai = pytest.importorskip("openai")

QUERY = "This movie"
CHAIN = ("llm_2", "llm_1")
KEY = "secret"


def with_stop_text(trained: PolicySet) -> PolicySet:
    """Returns the same policies with the stop text `o`."""
    return replace(trained, settings=trained.settings.model_copy(update={"stop": "o"}))


def make_client(address: str, key: str = KEY) -> Any:
    return openai.OpenAI(base_url=address, api_key=key, max_retries=0, timeout=100)


def make_model(trained: PolicySet, *policy_ids: str, feedback: bool = False) -> TrainedChain:
    return TrainedChain(trained, policy_ids, 0.7, 0, feedback=feedback)


@contextlib.contextmanager
def running_server(runner: BatchRunner, models: Mapping[str, TrainedChain]) -> Iterator[Any]:
    """Serves models in this process, and gives a client."""
    sock = socket.create_server(("127.0.0.1", 0))
    app = server.make_app(runner, models, KEY)
    http_server = uvicorn.Server(uvicorn.Config(app, log_config=None, log_level="error"))
    thread = threading.Thread(target=http_server.run, args=([sock],))
    thread.start()
    yield make_client(f"http://127.0.0.1:{sock.getsockname()[1]}/v1")
    http_server.should_exit = True
    thread.join()
    assert runner.close(timeout=60)


@pytest.fixture(scope="module")
def client(policies_run: Run) -> Iterator[Any]:
    """A client of a server in this process, for the run's best checkpoint with transformers."""
    trained = open_trained(policies_run.path)
    runner = BatchRunner(load_generator(trained, CHAIN, "transformers", 8), None, 8)
    models = {policy_id: make_model(trained, policy_id) for policy_id in CHAIN}
    models["chain"] = make_model(trained, *CHAIN)
    models["stopping"] = make_model(with_stop_text(trained), "llm_1")
    with running_server(runner, models) as running_client:
        yield running_client


def responses(run: Run, policy_ids: tuple[str, ...], temperature: float, seed: int = 0, count: int = 1) -> list[Any]:
    """Returns the responses of `cory generate` to several copies of the query."""
    chain = TrainedChain(open_trained(run.path), policy_ids, temperature, seed)
    return [[response["text"] for response in chain.answer(number, QUERY)["responses"]] for number in range(count)]


def user(text: str = QUERY) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_the_models_are_the_policies_and_their_chain(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["llm_2", "llm_1", "chain", "stopping"]
    assert client.models.retrieve("chain").id == "chain"


def test_with_a_seed_responses_equal_those_of_generate_and_a_chain_includes_drafts(
    client: Any, policies_run: Run
) -> None:
    expected = responses(policies_run, CHAIN, 0.7, seed=3, count=2)
    completion = client.chat.completions.create(model="chain", messages=user(), seed=3, n=2)
    for choice, (draft, text) in zip(completion.choices, expected, strict=True):
        assert choice.message.content == text
        assert choice.message.drafts == [{"role": "pioneer", "policy": "llm_2", "content": draft}]
    text_completion = client.completions.create(model="chain", prompt=[QUERY, QUERY], seed=3)
    assert [choice.text for choice in text_completion.choices] == [text for _, text in expected]
    assert text_completion.usage.completion_tokens == completion.usage.completion_tokens == 32


def test_a_stream_has_a_chunk_per_choice_with_its_drafts_and_text(client: Any) -> None:
    fields: dict[str, Any] = {"model": "chain", "messages": user(), "seed": 5, "n": 2}
    complete = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert [chunk.object for chunk in chunks] == ["chat.completion.chunk"] * 3
    for chunk, expected in zip(chunks, complete.choices, strict=False):
        (choice,) = chunk.choices
        assert (choice.index, choice.finish_reason) == (expected.index, "length")
        assert choice.delta.role == "assistant" and choice.delta.drafts == expected.message.drafts
        assert choice.delta.content == expected.message.content
    assert not chunks[-1].choices and chunks[-1].usage == complete.usage


def test_a_policy_continues_a_text_and_ends_before_a_stop_text(client: Any, policies_run: Run) -> None:
    ((text,),) = responses(policies_run, ("llm_1",), 0)
    (choice,) = client.completions.create(model="llm_1", prompt=QUERY, temperature=0).choices
    assert (choice.text, choice.finish_reason) == (text, "length") and not hasattr(choice, "drafts")
    stop = text[5:9]
    (choice,) = client.completions.create(model="llm_1", prompt=QUERY, temperature=0, stop=stop).choices
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
    (choice,) = client.completions.create(model="llm_1", prompt=QUERY, temperature=0, max_tokens=2).choices
    assert text.startswith(choice.text) and len(choice.text) < len(text)


def test_the_run_s_stop_text_ends_a_response_as_in_generate(client: Any, policies_run: Run) -> None:
    ((full_text,),) = responses(policies_run, ("llm_1",), 0)
    text = full_text.partition("o")[0]
    assert "o" in full_text and not text.endswith(" ")  # the token with the `o` also contains text before it
    chain = TrainedChain(with_stop_text(open_trained(policies_run.path)), ("llm_1",), 0, 0)
    assert chain.answer(0, QUERY)["responses"][0]["text"] == text
    fields: dict[str, Any] = {"model": "stopping", "temperature": 0}
    for stops in ("~", ["~", "o", "oo"]):
        (choice,) = client.completions.create(prompt=QUERY, stop=stops, **fields).choices
        assert (choice.text, choice.finish_reason) == (text, "stop")
        (choice,) = client.chat.completions.create(messages=user(), stop=stops, **fields).choices
        assert (choice.message.content, choice.finish_reason) == (text, "stop")
        chunks = client.completions.create(prompt=QUERY, stop=stops, stream=True, **fields)
        assert "".join(choice.text or "" for chunk in chunks for choice in chunk.choices) == text


def test_concurrent_requests_get_the_same_responses_as_sequential_ones(client: Any) -> None:
    seeds = range(6)

    def complete(seed: int) -> str:
        return str(client.completions.create(model=CHAIN[seed % 2], prompt=QUERY, seed=seed).choices[0].text)

    concurrent: dict[int, str] = {}
    threads = [threading.Thread(target=lambda seed=seed: concurrent.update({seed: complete(seed)})) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert concurrent == {seed: complete(seed) for seed in seeds}


@pytest.mark.parametrize(
    ("fields", "status", "code", "message"),
    [
        ({"model": "llm_7"}, 404, "model_not_found", "This server has: llm_2, llm_1, chain, stopping."),
        ({"messages": user("word " * 200)}, 400, "context_length_exceeded", "needs a prompt of"),
        ({"messages": [{"role": "system", "content": "Be kind."}, *user()]}, 400, None, "without a chat template"),
        ({"top_p": 0.9}, 400, "unsupported_parameter", "sampling uses temperature only"),
        ({"extra_body": {"typo": 1}}, 400, "unsupported_parameter", "typo=1 is not supported"),
        ({"temperature": -1}, 400, None, "temperature: Input should be greater than"),
        ({"temperature": 2.5}, 400, None, "temperature: Input should be less than or equal to 2"),
        ({"messages": user("")}, 400, None, "The prompt is empty."),
        ({"logprobs": True}, 400, "unsupported_parameter", "sampling uses temperature only"),
        ({"stop": 3}, 400, None, "stop: Input should be a valid list."),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None, "Input should be 'text'"),
        ({"messages": [{"role": "user", "content": None}]}, 400, None, "messages.0.content is null. Send the text"),
        ({"messages": []}, 400, None, "messages: List should have at least 1 item"),
        ({"messages": user("word " * 200), "stream": True}, 400, "context_length_exceeded", "needs a prompt of"),
    ],
)
def test_invalid_chat_requests_get_openai_errors(
    client: Any, fields: dict[str, Any], status: int, code: str | None, message: str
) -> None:
    with pytest.raises(openai.APIStatusError) as error:
        client.chat.completions.create(**{"model": "chain", "messages": user(), **fields})
    assert (error.value.status_code, error.value.code) == (status, code)
    assert message in error.value.body["message"]


def test_invalid_completion_requests_get_openai_errors(client: Any) -> None:
    for model, fields, message in (
        ("llm_1", {"logprobs": 0}, "logprobs=0 is not supported"),
        ("chain", {"prompt": ""}, "The prompt is empty."),
        ("llm_1", {"prompt": []}, "prompt: Value should have at least 1 item"),
        ("llm_1", {"prompt": [QUERY] * 65}, "A request may have at most 64 responses."),
        ("chain", {"prompt": [QUERY, "word " * 200], "stream": True}, "needs a prompt of"),
        ("llm_1", {"prompt": "word " * 2**18}, "413"),
    ):
        with pytest.raises(openai.APIStatusError, match=message):
            client.completions.create(**{"model": model, "prompt": QUERY, **fields})


def test_a_body_that_is_not_a_json_object_is_rejected(client: Any) -> None:
    for content in (b'{"model": ', b"[1]", b""):
        with pytest.raises(openai.APIStatusError, match=r"The body must be a JSON object\."):
            client.post("/chat/completions", content=content, cast_to=object)


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("chat/completions", "messages", r'[{"role": "user", "content": "half an emoji \ud83d"}]'),
        ("chat/completions", "messages", r'[{"role": "user", "content": [{"type": "text", "text": "\ude00"}]}]'),
        ("chat/completions", "stop", r'["\ud83d"]'),
        ("chat/completions", "columns", r'{"letter": ["\ud83d"]}'),
        ("chat/completions", "columns", r'{"\ud83d": 1}'),
        ("chat/completions", "model", r'"\ud83d"'),
        ("chat/completions", "chat_template_kwargs", r'{"name": "\ud83d"}'),
        ("completions", "prompt", r'["whole", "half \ud83d"]'),
    ],
)
def test_half_of_a_surrogate_pair_is_the_client_s_error(client: Any, path: str, field: str, value: str) -> None:
    body = {"model": '"chain"', "messages": json.dumps(user())} if "chat" in path else {"model": '"llm_1"'}
    for fields in ({**body, field: value}, {**body, field: value, "stream": "true"}):
        content = "{" + ", ".join(f'"{name}": {text}' for name, text in fields.items()) + "}"
        with pytest.raises(openai.BadRequestError, match=f"{field}: contains half of a surrogate pair") as error:
            client.post(f"/{path}", content=content.encode(), cast_to=object)
        assert error.value.body["type"] == "invalid_request_error" and error.value.body["param"] == field


def test_an_empty_stop_text_is_ignored(client: Any) -> None:
    texts = [
        client.completions.create(model="llm_1", prompt=QUERY, max_tokens=4, seed=1, **stop).choices[0].text
        for stop in ({}, {"stop": ""}, {"stop": [""]})
    ]
    assert texts[0] and len({*texts}) == 1


def test_fields_with_neutral_values_are_accepted(client: Any) -> None:
    neutral: dict[str, Any] = {"logprobs": None, "min_p": 0, "repetition_penalty": 1.0, "suffix": None, "user": "me"}
    for endpoint, query in (("chat/completions", {"messages": user()}), ("completions", {"prompt": QUERY})):
        body = {"model": "llm_1", "max_tokens": 1, "service_tier": None, **query, **neutral}
        assert client.post(f"/{endpoint}", body=body, cast_to=object)["choices"]


def test_a_wrong_key_and_a_wrong_path_are_rejected(client: Any) -> None:
    with pytest.raises(openai.AuthenticationError, match="The API key is missing or invalid"):
        make_client(str(client.base_url), "other").models.list()
    connection = http.client.HTTPConnection(client.base_url.host, client.base_url.port, timeout=20)
    connection.request("GET", "/v1/models", headers={"Authorization": b"Bearer \xff".decode("latin1")})
    assert connection.getresponse().status == 401  # the key is not UTF-8
    connection.close()
    with pytest.raises(openai.NotFoundError, match="Not Found"):
        client.embeddings.create(model="llm_1", input=QUERY)


def test_errors_before_serving_have_a_message(
    policies_run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = str(sock.getsockname()[1])
        assert main(["serve", str(policies_run.path), "--port", port]) == 2
    assert f"Error: Cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err
    assert main(["serve", str(policies_run.path), "--roles", "llm_7", "--port", "0"]) == 2
    assert "Unknown policy `llm_7`" in capsys.readouterr().err
    monkeypatch.delattr("launch.serving.server")
    monkeypatch.delitem(sys.modules, "launch.serving.server")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", str(policies_run.path), "--port", "0"]) == 2
    assert "requires uvicorn. Run `pip install 'cory-rllib[serve]'`." in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")
def test_ctrl_c_stops_the_server_while_it_loads(policies_run: Run, tmp_path: Path) -> None:
    for seconds in (1, 2, 3):  # while vLLM is imported and while an engine starts
        process = start_cory(tmp_path, "serve", str(policies_run.path), "--port", "0")
        try:
            assert process.stderr is not None
            assert "Loading" in process.stderr.readline()
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=seconds)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=4) == -signal.SIGINT
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed")
def test_vllm_responses_equal_those_of_generate_and_sigterm_stops_the_server(policies_run: Run, tmp_path: Path) -> None:
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
        lines = [process.stderr.readline(), process.stderr.readline()]
        address = re.search(r"Serving llm_2, llm_1, chain at (\S+) \(vllm\)", lines[-1])
        assert address, lines
        client = make_client(address[1])
        expected = responses(policies_run, CHAIN, 0)
        message = client.chat.completions.create(model="chain", messages=user(), temperature=0).choices[0].message
        assert [[message.drafts[0]["content"], message.content]] == expected
        first, second = (client.completions.create(model="llm_1", prompt=QUERY, seed=2, n=3) for _ in range(2))
        assert [choice.text for choice in first.choices] == [choice.text for choice in second.choices]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        assert process.stderr.read() == ""
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_conversation_becomes_a_query_with_history() -> None:
    tokenizer = load_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    task = Task(name="custom", train=[], test=[], reward="r:r", prompt_template="Q: {query}")
    chain = Chain(task, tokenizer, num_agents=1, chat=True)
    system, reply = {"role": "developer", "content": "Be kind."}, {"role": "assistant", "content": "Ho"}
    messages = [system, *user("Hi"), reply, *user()]
    text, history = server.parse_conversation(ChatRequest(model="llm_1", messages=messages))
    (prompt,) = chain.encoders[0].encode_prompts([Query(0, text, history=history)])
    assert tokenizer.decode(prompt) == f"system: Be kind.\nuser: Hi\nassistant: Ho\nuser: Q: {QUERY}\nassistant:"
    with pytest.raises(RequestError, match="The last message must have the role user"):
        server.parse_conversation(ChatRequest(model="llm_1", messages=messages[:-1]))
    tokenizer.chat_template = (
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}{{ 'A:' if add_generation_prompt }}"
    )
    chain = Chain(task, tokenizer, num_agents=1, chat=True)
    with pytest.raises(ChatError) as error:
        chain.encoders[0].encode_prompts([Query(0, text, history=history)])
    status, body = openai_error(error.value)
    assert status == 400 and "drops the message of the role system" in body["error"]["message"]
