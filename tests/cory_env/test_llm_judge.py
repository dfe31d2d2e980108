"""The LLM judge, with HTTP requests to a local test server."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cory_env.rewarding.worker import RewardError, RewardWorker

ServerReply = tuple[int, dict[str, str], str]


class JudgeServer(ThreadingHTTPServer):
    """Records requests and sends the replies in `script` in order; the last one repeats."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.script: list[ServerReply] = []
        self.active = self.max_active = 0
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    server: JudgeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.requests.append(body)
            self.server.keys.append(self.headers.get("authorization"))
            script = self.server.script
            status, headers, text = script.pop(0) if len(script) > 1 else script[0]
            self.server.active += 1
            self.server.max_active = max(self.server.max_active, self.server.active)
        reply = {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": {"total_tokens": 100}}
        payload = (json.dumps(reply) if status == 200 else text).encode()
        content_type = "application/json" if status == 200 else "text/html"
        threading.Event().wait(0.05)
        with self.server.lock:
            self.server.active -= 1
        self.send_response(status)
        for name, value in {"content-length": str(len(payload)), "content-type": content_type, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with JudgeServer() as judge_server:
        threading.Thread(target=judge_server.serve_forever, daemon=True).start()
        yield judge_server
        judge_server.shutdown()


def ok(text: str) -> ServerReply:
    return 200, {}, text


def worker(server: JudgeServer, settings: str = "", **options: Any) -> RewardWorker:
    url = f"http://127.0.0.1:{server.server_port}/v1"
    return RewardWorker(f"cory_env.rewards.llm_judge:score?url={url}&model=m{settings}", timeout=30, **options)


def test_the_last_score_of_a_reply_counts(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server.script = [ok("It could be **Score: 9**, but no.\nScore: 7.5")]
    with worker(server, "&key=JUDGE_KEY&parallel=2") as judge:
        assert judge.rewards(["Name a fruit."] * 6, ["An apple."] * 6, {"role": ["pioneer"] * 6}) == [0.75] * 6
    assert server.keys == ["Bearer secret"] * 6 and server.max_active == 2
    prompt = server.requests[0]["messages"][0]["content"]
    assert "Asked:\nName a fruit.\n\nAnswer:\nAn apple.\n" in prompt and server.requests[0]["model"] == "m"


def test_templates_use_columns_and_scores_are_rescaled(
    server: JudgeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    (tmp_path / "judge.txt").write_text("{completion} against {gold}")
    server.script = [ok("Score: 4"), ok("score = -3"), ok("Score: 99")]
    conversation: Any = [{"role": "assistant", "content": "{braces}"}]
    with worker(server, f"&template={tmp_path / 'judge.txt'}&low=1&high=5&parallel=1&key=UNSET") as judge:
        assert judge.rewards(["?"] * 3, [conversation] * 3, {"gold": ["a", "b", "c"]}) == [0.75, 0.0, 1.0]
        with pytest.raises(RewardError, match="template requires 'gold'"):
            judge.rewards(["?"], ["x"], {})
    assert server.keys[0] == "Bearer EMPTY"  # OPENAI_API_KEY is not sent to another judge
    assert [body["messages"][0]["content"] for body in server.requests[:2]] == [
        f"assistant: {{braces}} against {gold}" for gold in "ab"
    ]


def test_temporary_errors_are_retried_and_other_errors_do_not_show_the_key(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with worker(server, "&parallel=1&tries=3") as judge:
        server.script = [(429, {"retry-after": "0.2"}, "slow down"), (503, {}, "busy"), ok("Score: 10")]
        assert judge.rewards(["?"], ["x"], {}) == [1.0] and len(server.requests) == 3
        server.script = [(503, {}, "busy")]
        with pytest.raises(RewardError, match=r"raised openai\.InternalServerError: Error code: 503"):
            judge.rewards(["?"], ["x"], {})
        server.script = [(401, {}, "wrong key")]
        count = len(server.requests)
        with pytest.raises(RewardError, match=r"raised openai\.AuthenticationError: Error code: 401") as error:
            judge.rewards(["?"], ["x"], {})
        assert len(server.requests) == count + 1 and "secret" not in str(error.value)
    with worker(server, "&parallel=1&tries=2", on_error="skip") as judge:
        server.script = [ok("I like it."), ok("I do."), ok("Score: 5")]
        assert judge.rewards(["?"] * 2, ["x", "y"], {}) == [None, 0.5]


def test_an_unreachable_server_is_reported() -> None:
    unreachable = RewardWorker("cory_env.rewards.llm_judge:score?url=http://127.0.0.1:9/v1&model=m&tries=2", timeout=30)
    with unreachable, pytest.raises(RewardError, match=r"raised openai\.APIConnectionError"):
        unreachable.rewards(["?"], ["x"], {})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("url=localhost&model=m", "url String should match"),
        ("url=http://x&model=m&tries=many", "tries Input should be a valid integer"),
        ("url=http://x&model=m&low=5&high=5", "low must be below high"),
        ("url=http://x&model=m&template=/no/such.txt", "template cannot be read: .*/no/such.txt"),
    ],
)
def test_invalid_settings_are_reported_at_the_start(settings: str, message: str) -> None:
    worker = RewardWorker(f"cory_env.rewards.llm_judge:score?{settings}", timeout=30)
    with worker, pytest.raises(RewardError, match=f"cannot be used: .*{message}"):
        worker.start()
