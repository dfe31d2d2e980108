"""A language model behind an OpenAI-compatible address as the judge of responses.

    cory_env.rewards.llm_judge:score?url=http://localhost:8000/v1&model=Qwen/Qwen3-32B&template=judge.txt

The judge is asked for each response, and the last `Score: N` of its reply counts, as a share of the scale. The key
stands in the environment variable OPENAI_API_KEY, or in the one that `key` names; without one, none is sent. Needs
httpx (extra `judge`).
"""

import asyncio
import logging
import math
import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

from cory_env.message import Message
from cory_env.rewards.prepared import checked_by

if TYPE_CHECKING:
    from httpx import AsyncClient, Response

TEMPLATE = """\
Judge how well an answer does what was asked, from 0 (not at all) to 10 (perfectly).

Asked:
{prompt}

Answer:
{completion}

Give your reasons in a few sentences. Then end with a line `Score: N`.
"""
SCORE = re.compile(r"score[\s:=*_`]{0,6}(-?\d{1,9}(?:\.\d{1,9})?)", re.IGNORECASE)
AGAIN = (408, 409, 429, 500, 502, 503, 504, 529)  # statuses after which the same request may succeed
LONGEST_WAIT = 30.0  # seconds

logger = logging.getLogger(__name__)


class JudgeError(RuntimeError):
    """The judge cannot be asked, or the budget is used up."""


@dataclass(frozen=True)
class Judge:
    """Whom to ask, and how; every field is a setting of the reward's name.

    Attributes:
        url: Of the API, up to `/v1`.
        model: Its name there.
        key: The environment variable that holds the key.
        template: A file with the question, with `{prompt}`, `{completion}` and columns of the data.
        low: The least score, which is paid 0.
        high: The best score, which is paid 1.
        calls: Most requests of this process, tries included; 0: no limit.
        tokens: Most tokens of this process, by the server's own count; 0: no limit.
        parallel: Requests at once.
        tries: Of each response, until its score is known.
        wait: Seconds before the second try; twice as long before each later one, up to 30.
        timeout: Seconds that one request may take.
        reply: Most tokens of a reply.
    """

    url: str = ""
    model: str = ""
    key: str = "OPENAI_API_KEY"
    template: str = ""
    low: float = 0.0
    high: float = 10.0
    calls: int = 0
    tokens: int = 0
    parallel: int = 8
    tries: int = 5
    wait: float = 1.0
    timeout: float = 60.0
    reply: int = 512

    @cached_property
    def question(self) -> str:
        """The template's text."""
        return Path(self.template).read_text(encoding="utf-8") if self.template else TEMPLATE


@dataclass
class Spent:
    """What a judge has cost this process so far."""

    calls: int = 0
    tokens: int = 0


SPENT: dict[Judge, Spent] = {}


def make_judge(settings: Mapping[str, str]) -> Judge:
    """Reads settings, which are text.

    Raises:
        JudgeError: one is unknown, missing, no number or out of range, or there is no such template.
    """
    kinds: dict[str, Callable[[str], Any]] = {field.name: type(field.default) for field in fields(Judge)}
    if unknown := sorted(set(settings) - set(kinds)):
        raise JudgeError(f"The judge has no setting {unknown[0]!r}. Its settings are: {', '.join(kinds)}.")
    try:
        judge = Judge(**{name: kinds[name](value) for name, value in settings.items()})
    except ValueError as error:
        raise JudgeError(f"A setting of the judge is no number: {error}.") from error
    if not judge.url.startswith(("http://", "https://")) or not judge.model:
        raise JudgeError("The judge needs url=http… and model=NAME after the reward's name.")
    if not judge.low < judge.high or min(judge.parallel, judge.tries, judge.reply) < 1 or not judge.timeout > 0:
        raise JudgeError("The judge needs low below high, and parallel, tries, reply and timeout above 0.")
    try:
        names = {name for _, name, _, _ in Formatter().parse(judge.question) if name is not None}
    except (OSError, ValueError) as error:
        raise JudgeError(f"The judge's template {judge.template} cannot be read: {error}.") from error
    if "completion" not in names:
        raise JudgeError(f"The judge's template {judge.template} has no {{completion}}.")
    return judge


def check(**settings: str) -> None:
    """Finds out whether the judge can be asked, without asking.

    Raises:
        JudgeError: it cannot.
        ModuleNotFoundError: httpx is not installed.
    """
    make_judge(settings)
    _client_of()


@checked_by(check)
async def score(
    prompts: Sequence[str | list[Message]],
    completions: Sequence[str | list[Message]],
    url: str,
    model: str,
    key: str = "OPENAI_API_KEY",
    template: str = "",
    low: str = "0",
    high: str = "10",
    calls: str = "0",
    tokens: str = "0",
    parallel: str = "8",
    tries: str = "5",
    wait: str = "1",
    timeout: str = "60",
    reply: str = "512",
    **columns: Sequence[object],
) -> list[float | None]:
    """Returns the judge's score of each response, from 0 for `low` to 1 for `high`; settings are those of `Judge`.

    A response whose score the judge does not tell in all tries gets None, which is an error of that sample's own.

    Raises:
        JudgeError: the judge refuses, cannot be reached, or the budget is used up.
    """
    names = [field.name for field in fields(Judge)]
    given = (url, model, key, template, low, high, calls, tokens, parallel, tries, wait, timeout, reply)
    judge = make_judge(dict(zip(names, given, strict=True)))
    secret = os.environ.get(judge.key)
    turn = asyncio.Semaphore(judge.parallel)
    client_of = _client_of()

    async def of(index: int, client: "AsyncClient") -> float | None:
        values = {name: column[index] for name, column in columns.items()}
        values |= {"prompt": _text(prompts[index]), "completion": _text(completions[index])}
        try:
            question = judge.question.format_map(values)
        except (KeyError, IndexError, ValueError) as error:
            raise JudgeError(f"The judge's template asks for {error}, which the data does not have.") from error
        async with turn:
            return await _ask(judge, client, question)

    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    try:
        async with client_of(headers=headers, timeout=judge.timeout) as client, asyncio.TaskGroup() as group:
            asked = [group.create_task(of(index, client)) for index in range(len(completions))]
    except ExceptionGroup as failed:  # the others were given up for it
        raise failed.exceptions[0] from None
    return [task.result() for task in asked]


async def _ask(judge: Judge, client: "AsyncClient", question: str) -> float | None:
    """Asks until there is a score, or all tries are used."""
    import httpx

    body = {
        "model": judge.model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": judge.reply,
    }
    failure = ""
    for attempt in range(judge.tries):
        _spend(judge)
        pause = min(judge.wait * 2**attempt, LONGEST_WAIT) * random.uniform(0.5, 1.0)
        try:
            response = await client.post(f"{judge.url.rstrip('/')}/chat/completions", json=body)
        except httpx.TransportError as error:
            failure = f"{type(error).__name__}: {error}"
        else:
            if response.is_success:
                text = _reply(judge, response)
                if found := SCORE.findall(text):
                    return min(max((float(found[-1]) - judge.low) / (judge.high - judge.low), 0.0), 1.0)
                logger.warning("The judge gave no score: %r", text[-200:])
                failure = ""
            elif response.status_code in AGAIN:
                failure = f"status {response.status_code}: {response.text[:200]}"
                pause = max(pause, _asked_for(response))
            else:
                raise JudgeError(f"The judge at {judge.url} refused: {response.status_code} {response.text[:300]!r}.")
        if attempt + 1 < judge.tries:
            await asyncio.sleep(pause)
    if failure:
        raise JudgeError(f"The judge at {judge.url} did not answer in {judge.tries} tries ({failure}).")
    return None


def _spend(judge: Judge) -> None:
    spent = SPENT.setdefault(judge, Spent())
    for what, most, so_far in (("calls", judge.calls, spent.calls), ("tokens", judge.tokens, spent.tokens)):
        if most and so_far >= most:
            raise JudgeError(f"The judge's budget of {most} {what} is used up. Raise {what}, or train for less.")
    spent.calls += 1


def _reply(judge: Judge, response: "Response") -> str:
    try:
        found = response.json()
        SPENT[judge].tokens += int((found.get("usage") or {}).get("total_tokens", 0))
        return str(found["choices"][0]["message"]["content"] or "")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise JudgeError(
            f"The judge at {judge.url} does not speak the chat completions API: {response.text[:200]!r}."
        ) from error


def _asked_for(response: "Response") -> float:
    """Seconds that a server asks to wait."""
    try:
        seconds = float(response.headers.get("retry-after", 0))
    except ValueError:  # a date
        return 0.0
    return min(seconds, LONGEST_WAIT) if math.isfinite(seconds) else 0.0


def _text(turn: str | list[Message]) -> str:
    return turn if isinstance(turn, str) else "\n".join(f"{message['role']}: {message['content']}" for message in turn)


def _client_of() -> "type[AsyncClient]":
    try:
        from httpx import AsyncClient
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"A judge needs the package {error.name}: pip install 'cory-rllib[judge]'") from None
    return AsyncClient
