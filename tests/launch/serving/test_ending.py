"""Shutdown of `cory serve`, disconnecting clients and engine failures: no request waits forever."""

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import httpx
import pytest
import uvicorn

from launch.models.trained import open_trained
from launch.models.trained_chain import make_env_chain
from launch.run_folder.run import Run
from launch.serving import server
from launch.serving.request_queue import GenerationRequest, RequestQueue
from launch.serving.responses import ServedModel

openai = pytest.importorskip("openai")


class EndlessBackend:
    """A backend whose responses never end."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    def step(self, new: Sequence[GenerationRequest]) -> bool:
        self.requests = [request for request in [*self.requests, *new] if not request.done]
        for request in self.requests:
            request.emit([40])
        time.sleep(0.01)
        return bool(self.requests)

    def close(self) -> None:
        pass


class FailingBackend:
    """A backend whose engine has died."""

    def step(self, new: Sequence[GenerationRequest]) -> bool:
        raise RuntimeError("The engine has died")

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def restore_handler() -> Iterator[None]:
    """Restores the handler of SIGINT."""
    previous = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def test_ctrl_c_stops_a_server_within_seconds_even_with_pending_responses(
    policies_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SHUTDOWN_SECONDS", 1)
    model = ServedModel("llm_1", ("llm_1",), make_env_chain(open_trained(policies_run.path), ["llm_1"]))
    sock = socket.create_server(("127.0.0.1", 0))
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{sock.getsockname()[1]}/v1", api_key="none", max_retries=0, timeout=20
    )
    errors: list[Exception] = []
    started = threading.Event()
    interrupt_times: list[float] = []

    def complete(stream: bool) -> None:
        try:
            for _ in client.completions.create(model="llm_1", prompt="This", stream=stream):
                started.set()
        except (openai.APIError, httpx.HTTPError) as error:
            errors.append(error)

    def interrupt() -> None:
        started.wait(20)
        time.sleep(0.2)
        interrupt_times.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    backend = EndlessBackend()
    queue = RequestQueue(backend)
    threads = [threading.Thread(target=complete, args=(stream,)) for stream in (True, True, False)]
    for thread in (*threads, threading.Thread(target=interrupt)):
        thread.start()
    with pytest.raises(KeyboardInterrupt):
        server.serve(server.make_app(queue, {"llm_1": model}, 0.7, None), sock)
    assert time.monotonic() - interrupt_times[0] < 3
    queue.close()
    for thread in threads:
        thread.join(20)
    assert len(errors) == 3 and not any(not request.done for request in backend.requests)


@pytest.mark.parametrize("stream", [True, False])
def test_the_requests_of_a_disconnected_client_are_cancelled(policies_run: Run, stream: bool) -> None:
    backend = EndlessBackend()
    queue = RequestQueue(backend)
    model = ServedModel("llm_1", ("llm_1",), make_env_chain(open_trained(policies_run.path), ["llm_1"]))
    sock = socket.create_server(("127.0.0.1", 0))
    app = server.make_app(queue, {"llm_1": model}, 0.7, None)
    http_server = uvicorn.Server(uvicorn.Config(app, log_config=None, log_level="error"))
    thread = threading.Thread(target=http_server.run, args=([sock],))
    thread.start()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1/completions"
    body = {"model": "llm_1", "prompt": "This", "n": 2, "stream": stream}
    if stream:
        with httpx.stream("POST", url, json=body, timeout=20) as response:
            events = response.iter_lines()
            while len(backend.requests) < 2:
                next(events)
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body, timeout=2)
    deadline = time.monotonic() + 10
    while backend.requests and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not backend.requests
    http_server.should_exit = True
    thread.join(20)
    queue.close()


def test_every_request_to_a_dead_engine_fails() -> None:
    queue = RequestQueue(FailingBackend())

    async def generate() -> None:
        async for _ in queue.generate(GenerationRequest("llm_1", [1], 0.7, 4, 0, [2])):
            pass

    assert queue.healthy
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"The engine has died$"):
            asyncio.run(asyncio.wait_for(generate(), 10))
    assert not queue.healthy
    queue.close()
