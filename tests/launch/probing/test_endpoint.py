"""`cory probe --endpoint`, with HTTP requests to a local server that behaves like real ones at their worst."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cory_env.chain_settings import Thinking
from cory_env.episode import ChainEpisode
from launch.console.errors import CommandError
from launch.main import main
from launch.probing import endpoint
from launch.probing.endpoint import Endpoint, EndpointResponder
from launch.probing.plan import ProbePlan, plan_probe
from tests.launch.conftest import ENVIRONMENT
from tests.launch.probing.test_probe import FUNCTIONS, QUERIES

pytest.importorskip("openai")
ServerReply = tuple[int, dict[str, str], object]
SOON = {"retry-after-ms": "1"}
WORDS = ("task=custom", "data=q.jsonl", "reward=lengths:even", "max_response_tokens=6", "system_prompt=Be brief.")
OPTIONS = ("--solved-at", "1", "--samples", "3", "--temperatures", "0.7,1.3")


def complete(text: str | None, tokens: int | None = 3, reason: str = "stop", **message: object) -> ServerReply:
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": reason}
    usage = None if tokens is None else {"completion_tokens": tokens, "prompt_tokens": 1, "total_tokens": tokens + 1}
    return 200, {}, {"id": "1", "object": "chat.completion", "created": 1, "choices": [choice], "usage": usage}


def fail(status: int, message: str, **headers: str) -> ServerReply:
    return status, {**SOON, **headers}, {"error": {"message": message}}


class ApiServer(ThreadingHTTPServer):
    """Records requests, and replies as `reply` says, which gets a request's body and its number."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.reply: Callable[[dict[str, Any], int], ServerReply] = lambda body, number: complete(f"text {number % 7}")
        self.active = self.max_active = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: ApiServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.requests.append(body)
            self.server.keys.add(self.headers.get("authorization"))
            number = len(self.server.requests)
            self.server.active += 1
            self.server.max_active = max(self.server.max_active, self.server.active)
        time.sleep(0.01)
        status, headers, reply = self.server.reply(body, number)
        with self.server.lock:
            self.server.active -= 1
        is_page = isinstance(reply, str)
        payload = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
        self.send_response(status)
        content_type = "text/html" if is_page else "application/json"
        for name, value in {"content-length": str(len(payload)), "content-type": content_type, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer() as api_server:
        threading.Thread(target=api_server.serve_forever, args=(0.01,), daemon=True).start()
        yield api_server
        api_server.shutdown()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with queries and functions."""
    monkeypatch.chdir(tmp_path)
    rows = [{"query": f"The film number {number}", "number": str(number)} for number in range(QUERIES)]
    Path("q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("lengths.py").write_text(FUNCTIONS)
    monkeypatch.delenv(endpoint.KEY, raising=False)
    return tmp_path


def probe(server: ApiServer, *words: str) -> int:
    return main(["probe", "--endpoint", server.url, "--model", "org/m", *WORDS, *OPTIONS, "--out", "out", *words])


def read_samples() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("out/responses.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> ProbePlan:
    """A plan whose address is that of no server."""
    data = tmp_path_factory.mktemp("plan") / "q.jsonl"
    data.write_text("".join(json.dumps({"query": f"The film number {number}"}) + "\n" for number in range(QUERIES)))
    return plan_probe(
        "org/m",
        {
            "task": "custom",
            "data": str(data),
            "reward": "tests.policies.sample_rewards:letters",
            "max_response_tokens": 6,
        },
        lambda text: None,
        split="test",
        queries=None,
        samples=3,
        temperatures=[0.7],
        solved_at=1,
        endpoint=Endpoint("http://localhost/v1", "org/m"),
    )


def respond_once(plan: ProbePlan, server: ApiServer, timeout: float = 30.0) -> ChainEpisode:
    """Returns an episode with responses of the server."""
    responder = EndpointResponder(Endpoint(server.url, "org/m", timeout=timeout), plan.settings)
    with contextlib.closing(responder):
        episode = responder.make_episode(plan.plain, plan.task.test[0])
        responder.respond([episode], [0], plan.policy_ids, 0.7)
    return episode


def test_a_probe_of_an_api_reports_tables_and_saves_everything_but_the_key(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(endpoint.KEY, "secret-key\n")
    assert probe(server, "feedback=lengths:odd_length", "--concurrency", "3") == 0
    text = capsys.readouterr().out
    assert f"Probing org/m at {server.url} on task custom: 5 test queries × 3 answers, with feedback." in text
    assert "feedback chain, stop" in text and text.endswith("Results     out/probe.json\n")
    assert server.keys == {"Bearer secret-key"} and server.max_active == 3
    assert len(server.requests) == 2 * 3 * 3 * QUERIES  # temperatures, answers, samples
    record = json.loads(Path("out/probe.json").read_text())
    assert record["endpoint"] == {"url": server.url, "model": "org/m", "concurrency": 3, "timeout": 300.0}
    assert record["settings"]["model"] == "org/m" and record["sources"]["llms"] == {}
    assert "secret" not in "".join(file.read_text() for file in Path("out").iterdir())
    for sample in read_samples():
        assert sample["first"]["length"] == 3 and sample["first"]["ended"]
        assert sample["first"]["task_reward"] == float(len(sample["first"]["text"]) % 2 == 0)


def test_requests_have_the_settings_and_each_sample_its_seed(server: ApiServer) -> None:
    assert probe(server, "stop=END", 'chat_template_kwargs={"enable_thinking": false}') == 0
    first = [body for body in server.requests if "Reference" not in body["messages"][-1]["content"]]
    second = [body for body in server.requests if "Reference" in body["messages"][-1]["content"]]
    assert len(first) == len(second) == 2 * 3 * QUERIES
    for body in server.requests:
        assert (body["model"], body["max_tokens"], body["stop"]) == ("org/m", 6, "END")
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}
        assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert len({body["seed"] for body in server.requests}) == 2 * 3 * QUERIES  # the same at each temperature
    replies = {f"text {number}" for number in range(7)}
    assert {body["messages"][-1]["content"].splitlines()[0].removeprefix("Reference: ") for body in second} <= replies
    seeds = sorted(body["seed"] for body in server.requests)
    server.requests.clear()
    assert probe(server, "--out", "again") == 0
    assert sorted(body["seed"] for body in server.requests) == seeds


def test_conversations_are_sent_with_their_own_system_message(server: ApiServer) -> None:
    history = [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}, {"role": "user", "content": "C"}]
    Path("q.jsonl").write_text(f"{json.dumps({'query': history})}\n" * 4)
    Path("mine.py").write_text(
        "def score(completions):\n    return [float(c[0]['content'] == 'x') for c in completions]"
    )
    server.reply = lambda body, number: complete("x")
    assert probe(server, "reward=mine:score") == 0
    assert server.requests[0]["messages"] == history
    assert {sample["first"]["task_reward"] for sample in read_samples()} == {1.0}


def test_empty_and_cut_answers_are_scored_and_counted(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    def reply(body: dict[str, Any], number: int) -> ServerReply:
        if "Reference" in body["messages"][-1]["content"]:
            return complete("cut", tokens=6, reason="length")
        return complete(None, tokens=5, reasoning_content="Thoughts are no answer, but cost tokens.")

    server.reply = reply
    Path("mine.py").write_text("def score(completions):\n    return [float(c == 'cut') for c in completions]")
    assert probe(server, "reward=mine:score") == 0
    assert "Of 60 answers, 30 were cut at max_response_tokens, 30 were empty." in capsys.readouterr().out
    assert read_samples()[0]["first"] == {"text": "", "length": 5, "task_reward": 0.0, "ended": True}
    assert read_samples()[0]["second"] == {"text": "cut", "length": 6, "task_reward": 1.0, "ended": False}
    assert json.loads(Path("out/probe.json").read_text())["answers"] == {"all": 60, "cut": 30, "empty": 30}


@pytest.mark.parametrize(
    ("text", "answer"), [("<t>Hm.</t>7", "7"), ("Hm.</t>7", "7"), ("<t>Hm.", None), ("7", "7"), ("\ud83d", "?")]
)
def test_thoughts_are_removed(plan: ProbePlan, server: ApiServer, text: str, answer: str | None) -> None:
    thinking = Thinking("<t>", "</t>")
    server.reply = lambda body, number: complete(text)
    episode = respond_once(plan._replace(settings=plan.settings.model_copy(update={"thinking": thinking})), server)
    assert (episode.completions[0], episode.has_answer(0)) == (answer or "", answer is not None)


def test_temporary_errors_are_retried(plan: ProbePlan, server: ApiServer) -> None:
    errors = [fail(429, "slow down"), fail(503, "loading"), fail(429, "slow down")]
    server.reply = lambda body, number: errors.pop() if errors else complete("at last")
    assert respond_once(plan, server).completions == ["at last"] * 2 and not errors


def test_models_that_insist_on_another_name_of_the_limit_get_it(plan: ProbePlan, server: ApiServer) -> None:
    def reply(body: dict[str, Any], number: int) -> ServerReply:
        if "max_tokens" in body:
            return fail(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
        return complete(f"{body['max_completion_tokens']}")

    server.reply = reply
    assert respond_once(plan, server).completions == ["6", "6"]
    assert len(server.requests) == 3  # the second agent's has the right name at once


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (
            fail(401, "Invalid key secret-key!"),
            r"rejects the API key \(HTTP 401: Invalid key \*\*\*!\). Correct OPENAI",
        ),
        (fail(404, "No model org/m."), r"has no model org/m, or is not the API \(HTTP 404: No model org/m\). Correct"),
        ((404, {}, "<html>Not found</html>"), r"is not the API \(HTTP 404\). Correct --model, or --endpoint"),
        (fail(429, "Slow\n down."), r"refuses so many requests, 5 times \(HTTP 429: Slow down\). Lower --concurrency"),
        (fail(500, "The engine died."), r"failed 5 times \(HTTP 500: The engine died\)."),
        (fail(400, "The prompt is too long."), r"rejects a request \(HTTP 400: The prompt is too long\)."),
        (complete("x", tokens=None), "does not report `usage.completion_tokens`"),
        ((200, {}, "<html>Welcome</html>"), "does not answer like OpenAI's API. Correct --endpoint"),
        ((200, {}, {"object": "error"}), "does not answer like OpenAI's API"),
        ((200, {"content-type": "application/json"}, "{"), "does not answer like OpenAI's API"),
    ],
)
def test_errors_of_the_server_are_one_sentence(
    plan: ProbePlan, server: ApiServer, reply: ServerReply, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(endpoint.KEY, "secret-key")
    server.reply = lambda body, number: reply
    with pytest.raises(CommandError, match=message) as error:
        respond_once(plan, server)
    assert "\n" not in str(error.value) and "secret" not in str(error.value)


def test_a_server_that_hangs_or_is_gone_is_reported(
    plan: ProbePlan, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "MAX_RETRIES", 1)
    released = threading.Event()

    def hang(body: dict[str, Any], number: int) -> ServerReply:
        released.wait(5)
        return complete("late")

    server.reply = hang
    with pytest.raises(CommandError, match=r"did not answer within 0.1 s, 2 times. Raise --timeout, or lower"):
        respond_once(plan, server, timeout=0.1)
    released.set()
    assert len(server.requests) == 2
    server.server_close()
    with pytest.raises(CommandError, match=r"cannot be reached: .*\. Correct --endpoint, or start the server"):
        respond_once(plan, server)


def test_the_answers_before_a_failure_are_kept_until_the_probe_is_repeated(server: ApiServer) -> None:
    server.reply = lambda body, number: fail(401, "no key") if number > 20 else complete(f"text {number}")
    assert probe(server, "--concurrency", "1") == 2
    lines = Path("out/responses.jsonl").read_text().splitlines()  # of the first two batches, 4 × 2 answers each
    assert len(lines) == 8 and json.loads(lines[0])["first"]["text"] == "text 1"
    assert not Path("out/probe.json").exists()
    server.reply = lambda body, number: complete("x")
    assert probe(server) == 0
    assert len(Path("out/responses.jsonl").read_text().splitlines()) == QUERIES * 3 * 2


def test_a_failed_probe_leaves_no_results_and_can_be_repeated(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.reply = lambda body, number: fail(401, "no key") if number > 20 else complete("x")
    assert probe(server) == 2
    assert "rejects the API key (HTTP 401: no key). Set OPENAI_API_KEY" in capsys.readouterr().err
    assert {file.name for file in Path("out").iterdir()} == {"log.txt", ".lock"} and server.keys == {"Bearer EMPTY"}
    server.reply = lambda body, number: complete("x")
    assert probe(server) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--endpoint", "http://h/v1"], "--endpoint requires --model, the model's name in the API."),
        (["smollm2", "--model", "m"], "--model requires --endpoint."),
        (["smollm2", "--concurrency", "2"], "--concurrency requires --endpoint."),
        ([], "Name a run or a model, or set --endpoint and --model."),
        (["smollm2", "--endpoint", "http://h/v1", "--model", "m"], "--endpoint conflicts with smollm2"),
        (["--endpoint", "localhost:8000/v1", "--model", "m"], "is not a URL such as http://localhost:8000/v1."),
        (["--endpoint", "http://h:port/v1", "--model", "m"], "is not a URL such as"),
        (["--endpoint", "http://me:password@h/v1", "--model", "m"], "contains a password, which results would show"),
        (
            ["--endpoint", "https://sk-key@h/v1", "--model", "m"],
            "has a user name or a part after #, which results would",
        ),
        (["--endpoint", "http://h/v1#api_key=1", "--model", "m"], "has a user name or a part after #, which results"),
        (["--endpoint", "http://h/v1", "--model", "m", "--roles", "a,b"], "--roles requires a run, but m is a model"),
        (["--endpoint", "http://h/v1", "--model", "m", "--timeout", "0"], "--timeout 0 must be above 0"),
        (
            ["--endpoint", "http://h/v1", "--model", "m", "chat=false", "system_prompt=null"],
            "chat=false conflicts with --endpoint",
        ),
        (["--endpoint", "http://h/v1", "--model", "m", "max_query_tokens=9"], "requires a tokenizer"),
        (["--endpoint", "http://h/v1", "--model", "m", "reward=lengths:missing"], "has no function 'missing'"),
        (["--endpoint", "http://h/v1", "--model", "m", "prompt={query} {year}"], "no value in column 'year'"),
    ],
)
def test_invalid_arguments_are_rejected_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [word for word in WORDS if word.partition("=")[0] not in {word.partition("=")[0] for word in words}]
    assert main(["probe", *words, *settings, *OPTIONS, "--out", "out"]) == 2
    assert message in " ".join(capsys.readouterr().err.split()) and not Path("out").exists()


def test_an_api_needs_neither_torch_nor_transformers(server: ApiServer) -> None:
    words = ["probe", "--endpoint", server.url, "--model", "m", *WORDS, *OPTIONS]
    code = (
        f"import sys; from launch.main import main; assert main({words!r}) == 0; "
        "assert not {'torch', 'transformers', 'vllm', 'ray'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=True, timeout=60)
