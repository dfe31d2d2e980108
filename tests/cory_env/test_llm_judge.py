"""A judge behind an OpenAI-compatible address, asked over HTTP at a server of the test's own."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cory_env.rewarding.worker import RewardError, RewardWorker

Answer = tuple[int, dict[str, str], str]


class Server(ThreadingHTTPServer):
    """Keeps what it was asked, and answers by the answer in the question: each in turn, the last for ever."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.script: list[Answer] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.asked.append(body)
            self.server.keys.append(self.headers.get("authorization"))
            script = self.server.script
            status, headers, text = script.pop(0) if len(script) > 1 else script[0]
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
        found = {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": {"total_tokens": 100}}
        payload = (json.dumps(found) if status == 200 else text).encode()
        kind = "application/json" if status == 200 else "text/html"
        threading.Event().wait(0.05)
        with self.server.lock:
            self.server.at_once -= 1
        self.send_response(status)
        for name, value in {"content-length": str(len(payload)), "content-type": kind, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.shutdown()


def said(text: str) -> Answer:
    return 200, {}, text


def worker(server: Server, settings: str = "", **rest: Any) -> RewardWorker:
    url = f"http://127.0.0.1:{server.server_port}/v1"
    return RewardWorker(f"cory_env.rewards.llm_judge:score?url={url}&model=m{settings}", timeout=30, **rest)


def test_each_response_is_judged_by_the_last_score_of_a_reply(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server.script = [said("It could be **Score: 9**, but no.\nScore: 7.5")]
    with worker(server, "&key=JUDGE_KEY&parallel=2") as judge:
        assert judge.rewards(["Name a fruit."] * 6, ["An apple."] * 6, {"role": ["pioneer"] * 6}) == [0.75] * 6
    assert server.keys == ["Bearer secret"] * 6 and server.most_at_once == 2
    question = server.asked[0]["messages"][0]["content"]
    assert "Asked:\nName a fruit.\n\nAnswer:\nAn apple.\n" in question and server.asked[0]["model"] == "m"


def test_a_template_has_the_data_s_columns_and_scores_have_a_scale(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    (tmp_path / "judge.txt").write_text("{completion} against {gold}")
    server.script = [said("Score: 4"), said("score = -3"), said("Score: 99")]
    conversation: Any = [{"role": "assistant", "content": "{braces}"}]
    with worker(server, f"&template={tmp_path / 'judge.txt'}&low=1&high=5&parallel=1&key=UNSET") as judge:
        assert judge.rewards(["?"] * 3, [conversation] * 3, {"gold": ["a", "b", "c"]}) == [0.75, 0.0, 1.0]
        with pytest.raises(RewardError, match="template asks for 'gold'"):
            judge.rewards(["?"], ["x"], {})
    assert server.keys[0] == "Bearer EMPTY"  # that of OPENAI_API_KEY is for whom it is meant
    assert [body["messages"][0]["content"] for body in server.asked[:2]] == [
        f"assistant: {{braces}} against {gold}" for gold in "ab"
    ]


def test_what_may_pass_is_tried_again_and_what_may_not_is_told_without_the_key(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with worker(server, "&parallel=1&tries=3") as judge:
        server.script = [(429, {"retry-after": "0.2"}, "slow down"), (503, {}, "busy"), said("Score: 10")]
        assert judge.rewards(["?"], ["x"], {}) == [1.0] and len(server.asked) == 3
        server.script = [(503, {}, "busy")]
        with pytest.raises(
            RewardError, match=r"did not answer in up to 3 tries \(InternalServerError: Error code: 503"
        ):
            judge.rewards(["?"], ["x"], {})
        server.script = [(401, {}, "wrong key")]
        asked = len(server.asked)
        with pytest.raises(RewardError, match="AuthenticationError: Error code: 401") as error:
            judge.rewards(["?"], ["x"], {})
        assert len(server.asked) == asked + 1 and "secret" not in str(error.value)
    with worker(server, "&parallel=1&tries=2", on_error="skip") as judge:
        server.script = [said("I like it."), said("I do."), said("Score: 5")]
        assert judge.rewards(["?"] * 2, ["x", "y"], {}) == [None, 0.5]


def test_a_server_that_is_not_there_is_told() -> None:
    gone = RewardWorker("cory_env.rewards.llm_judge:score?url=http://127.0.0.1:9/v1&model=m&tries=2", timeout=30)
    with gone, pytest.raises(RewardError, match=r"did not answer in up to 2 tries \(APIConnectionError"):
        gone.rewards(["?"], ["x"], {})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("url=localhost&model=m", "url String should match"),
        ("url=http://x&model=m&tries=many", "tries Input should be a valid integer"),
        ("url=http://x&model=m&low=5&high=5", "low must be below high"),
        ("url=http://x&model=m&template=/no/such.txt", "template cannot be read: .*/no/such.txt"),
    ],
)
def test_wrong_settings_are_told_at_the_start(settings: str, message: str) -> None:
    worker = RewardWorker(f"cory_env.rewards.llm_judge:score?{settings}", timeout=30)
    with worker, pytest.raises(RewardError, match=f"cannot be used: .*{message}"):
        worker.start()
