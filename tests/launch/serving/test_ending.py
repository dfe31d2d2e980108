"""Batches of `cory serve`, its shutdown, disconnecting clients and engine failures: no request waits forever."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import httpx
import pytest

from cory_env.episode import ChainEpisode
from cory_env.tasks import Query
from cory_env.tasks.task import TemplateError
from launch.models.trained import open_trained
from launch.run_folder.run import Run
from launch.serving import server
from launch.serving.batches import BatchRunner, Finished
from policies.generation.generator import IsReady, OnFinished, Request, Response
from policies.generation.transformers_generator import TransformersGenerator
from policies.rollout.chain_generation import ChainRequest
from tests.launch.serving.test_server import make_client, make_model, running_server

openai = pytest.importorskip("openai")


class FakeEngine(TransformersGenerator):
    """An engine without models. It responds when it is released, or fails."""

    def __init__(self) -> None:
        self.released, self.started = threading.Event(), threading.Event()
        self.batch_sizes: list[int] = []
        self.error: Exception | None = None

    def run_requests(
        self, requests: Sequence[Request], on_finished: OnFinished, is_ready: IsReady = lambda: False
    ) -> None:
        self.batch_sizes.append(len(requests))
        self.started.set()
        assert self.released.wait(60)
        if self.error is not None:
            raise self.error
        on_finished([(request.key, Response([40], [0.0])) for request in requests])

    def close(self) -> None:
        pass


class RecordingRunner(BatchRunner):
    """Keeps the futures of all requests."""

    def __init__(self, *args: Any) -> None:
        self.futures: list[Future[Finished]] = []
        super().__init__(*args)

    def submit(self, chain: ChainRequest) -> Future[Finished]:
        self.futures.append(super().submit(chain))
        return self.futures[-1]


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.released.set()


@pytest.fixture(autouse=True)
def restore_handler() -> Iterator[None]:
    """Restores the handler of SIGINT."""
    previous = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def test_ctrl_c_stops_a_server_within_seconds_even_with_pending_responses(
    policies_run: Run, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SHUTDOWN_SECONDS", 1)
    sock = socket.create_server(("127.0.0.1", 0))
    client = make_client(f"http://127.0.0.1:{sock.getsockname()[1]}/v1")
    errors: list[Exception] = []

    def complete(stream: bool) -> None:
        try:
            client.completions.create(model="llm_1", prompt="This", stream=stream)
        except (openai.APIError, httpx.HTTPError) as error:
            errors.append(error)

    def interrupt() -> None:
        if engine.started.wait(60):
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)

    runner = BatchRunner(engine, None, 1)
    app = server.make_app(runner, {"llm_1": make_model(open_trained(policies_run.path), "llm_1")}, None)
    threads = [threading.Thread(target=complete, args=(stream,)) for stream in (True, True, False)]
    for thread in (*threads, threading.Thread(target=interrupt)):
        thread.start()
    with pytest.raises(KeyboardInterrupt):
        server.serve(app, sock)
    for thread in threads:
        thread.join(20)
    assert len(errors) == 3
    assert not runner.close(timeout=0.1)  # the engine cannot be interrupted
    engine.released.set()
    assert runner.close(timeout=20) and engine.batch_sizes == [1]


def test_requests_that_arrive_while_a_batch_is_generated_form_the_next_ones(
    policies_run: Run, engine: FakeEngine
) -> None:
    model = make_model(open_trained(policies_run.path), "llm_1")
    runner = BatchRunner(engine, None, 4)

    def submit(number: int) -> Future[Finished]:
        return runner.submit(model.request(ChainEpisode(model.chain, Query(number, "This")), seed=number))

    futures = [submit(0)]
    assert engine.started.wait(20)
    futures += [submit(number) for number in range(1, 7)]
    engine.released.set()
    assert [future.result(20)[1][0].tokens for future in futures] == [[40]] * 7
    assert engine.batch_sizes == [1, 4, 2] and runner.close(timeout=20)


def test_an_error_of_one_chain_ends_neither_the_others_of_its_batch_nor_the_server_s_health(
    policies_run: Run, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(open_trained(policies_run.path), "llm_1")
    respond = ChainEpisode.respond

    def respond_unless_bad(episode: ChainEpisode, action: Any) -> None:
        if episode.query.text == "Bad":
            raise TemplateError("It is bad.")
        respond(episode, action)

    monkeypatch.setattr(ChainEpisode, "respond", respond_unless_bad)
    runner = BatchRunner(engine, None, 4)
    texts = ["First", "This", "Bad", "That"]
    futures = []
    for number, text in enumerate(texts):
        futures.append(runner.submit(model.request(ChainEpisode(model.chain, Query(number, text)), seed=number)))
        assert engine.started.wait(20)  # the first one is a batch of its own
    engine.released.set()
    for text, future in zip(texts, futures, strict=True):
        if text == "Bad":
            with pytest.raises(TemplateError, match="It is bad"):
                future.result(20)
        else:
            chain, responses = future.result(20)
            assert chain.episode.responses == [responses[0].tokens] == [[40]]
    assert engine.batch_sizes == [1, 3, 1, 1, 1] and runner.healthy and runner.close(timeout=20)


def test_the_waiting_requests_of_a_disconnected_client_are_cancelled(policies_run: Run, engine: FakeEngine) -> None:
    runner = RecordingRunner(engine, None, 1)
    with running_server(runner, {"llm_1": make_model(open_trained(policies_run.path), "llm_1")}) as client:
        for _ in range(2):
            with pytest.raises(openai.APITimeoutError):
                client.with_options(timeout=2).completions.create(model="llm_1", prompt="This", n=2)
        deadline = time.monotonic() + 60
        while sum(future.cancelled() for future in runner.futures) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        engine.released.set()
        assert len(client.completions.create(model="llm_1", prompt="This", n=2).choices) == 2
    assert engine.batch_sizes == [1, 1, 1]  # 1 of the 4 had begun


def test_every_request_to_a_dead_engine_fails_until_it_is_restarted(policies_run: Run, engine: FakeEngine) -> None:
    engine.released.set()
    runner = BatchRunner(engine, None, 8)
    with running_server(runner, {"llm_1": make_model(open_trained(policies_run.path), "llm_1")}) as client:
        health = str(client.base_url).replace("v1/", "health")

        def complete() -> Any:  # after an error of the server, its connection is closed
            return make_client(str(client.base_url)).completions.create(model="llm_1", prompt="This", n=2)

        assert httpx.get(health).status_code == 200
        engine.error = RuntimeError("The engine has died")
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="The engine has died"):
                complete()
        assert httpx.get(health).status_code == 503
        engine.error = None
        assert len(complete().choices) == 2
        assert httpx.get(health).status_code == 200
