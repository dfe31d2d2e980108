"""The end of `cory serve`, and of an engine under it: whoever waits is told, and nobody waits for ever."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from launch.console.interrupts import SIGNALS
from launch.models.trained import open_trained
from launch.models.trained_chain import chain_of
from launch.run_folder.run import Run
from launch.serving import server
from launch.serving.answers import Served
from launch.serving.desk import Ask, Desk

openai = pytest.importorskip("openai")


class Endless:
    """A backend whose answers go on and on."""

    def __init__(self) -> None:
        self.asked: list[Ask] = []

    def work(self, new: Sequence[Ask]) -> bool:
        self.asked = [ask for ask in [*self.asked, *new] if not ask.done]
        for ask in self.asked:
            ask.say([40])
        time.sleep(0.01)
        return bool(self.asked)

    def drop(self) -> None:
        self.asked.clear()

    def close(self) -> None:
        pass


class Dead:
    """A backend whose engine is gone."""

    def work(self, new: Sequence[Ask]) -> bool:
        raise RuntimeError("The engine is gone")

    def drop(self) -> None:
        raise RuntimeError("The engine is gone too")

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Puts back how signals are taken here."""
    usual = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in usual.items():
        signal.signal(number, handler)


def test_ctrl_c_ends_a_server_in_seconds_and_tells_those_whose_answers_are_not_finished(
    policies_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PATIENCE", 0.3)
    served = Served("llm_1", ("llm_1",), chain_of(open_trained(policies_run.path), ["llm_1"]))
    place = server.listen("127.0.0.1", 0)
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{place.getsockname()[1]}/v1", api_key="none", max_retries=0, timeout=20
    )
    told: list[Any] = []
    begun = threading.Event()

    def stream() -> None:
        try:
            for _ in client.completions.create(model="llm_1", prompt="This", stream=True):
                begun.set()
        except openai.APIError as error:
            told.append(error)

    def whole() -> None:
        try:
            client.completions.create(model="llm_1", prompt="This")
        except openai.APIStatusError as error:
            told.append(error)

    def interrupt() -> None:
        begun.wait(20)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    def begin() -> None:
        for thread in threads:
            thread.start()

    threads = [threading.Thread(target=each) for each in (stream, stream, whole, interrupt)]
    desk = Desk(Endless())
    ended: list[float] = []
    server.serve(
        server.Server(desk, {"llm_1": served}, 0.7, None),
        place,
        ready=begin,
        ending=lambda: ended.append(time.monotonic()),
    )
    took = time.monotonic() - ended[0]
    after = [signal.SIG_DFL, signal.SIG_DFL, signal.SIG_IGN]  # the second one kills, but for SIGHUP
    assert [signal.getsignal(number) for number in SIGNALS] == after
    desk.close()
    for thread in threads:
        thread.join(20)
    assert took < 0.3 + server.FAREWELL
    assert [error.body["message"] for error in told] == ["The server was ended before the answer was written."] * 3
    assert [error.status_code for error in told if isinstance(error, openai.APIStatusError)] == [503]


def test_who_asks_an_engine_that_is_gone_is_told_each_time() -> None:
    desk = Desk(Dead())

    async def ask() -> None:
        async for _ in desk.response(Ask("llm_1", [1], 0.7, 4, 0, [2])):
            pass

    assert desk.works
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"The engine is gone$"):
            asyncio.run(asyncio.wait_for(ask(), 10))
    assert not desk.works
    desk.close()
