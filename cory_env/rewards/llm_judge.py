"""A language model behind an OpenAI-compatible address as the judge of responses.

    cory_env.rewards.llm_judge:score?url=http://localhost:8000/v1&model=Qwen/Qwen3-32B&template=judge.txt

The judge is asked for each response, and the last `Score: N` of its reply counts, as a share of the scale. The key
is in the environment variable OPENAI_API_KEY, or in the one that `key` names; without one, EMPTY is sent. Needs openai
(extra `judge`), which also retries.
"""

import asyncio
import logging
import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from cory_env.message import Message
from cory_env.rewards.prepared import check_with, import_extra

if TYPE_CHECKING:
    from openai import AsyncOpenAI

TEMPLATE = """\
Judge how well an answer does what was asked, from 0 (not at all) to 10 (perfectly).

Asked:
{prompt}

Answer:
{completion}

Give your reasons in a few sentences. Then end with a line `Score: N`.
"""
SCORE = re.compile(r"score[\s:=*_`]{0,6}(-?\d{1,9}(?:\.\d{1,9})?)", re.IGNORECASE)

logger = logging.getLogger(__name__)


class JudgeError(RuntimeError):
    """The judge cannot be asked."""


class Judge(BaseModel, frozen=True, extra="forbid"):
    """Whom to ask, and how; every field is a setting of the reward's name.

    Attributes:
        url: Of the API, up to `/v1`.
        model: Its name there.
        key: The environment variable that holds the key.
        template: A file with the question, with `{prompt}`, `{completion}` and columns of the data.
        low: The least score, which is paid 0.
        high: The best score, which is paid 1.
        parallel: Requests at once.
        tries: Replies that each response may take until one tells its score, and requests that each reply may take.
        timeout: Seconds that one request may take.
        reply: Most tokens of a reply.
    """

    url: str = Field(pattern="^https?://")
    model: str
    key: str = "OPENAI_API_KEY"
    template: Path | None = None
    low: float = 0.0
    high: float = 10.0
    parallel: int = Field(8, ge=1)
    tries: int = Field(5, ge=1)
    timeout: float = Field(60.0, gt=0)
    reply: int = Field(512, ge=1)

    @cached_property
    def question(self) -> str:
        """The template's text."""
        return TEMPLATE if self.template is None else self.template.read_text(encoding="utf-8")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.low < self.high:
            raise ValueError("low must be below high")
        if "{completion}" not in self.question:
            raise ValueError("the template has no {completion}")
        return self


def make_judge(**settings: str) -> Judge:
    """Reads settings, which are text.

    Raises:
        JudgeError: one is unknown, missing, no number or out of range, or there is no such template.
    """
    try:
        return Judge.model_validate(settings)
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, each['loc']))} {each['msg']}".strip() for each in error.errors())
        raise JudgeError(
            f"The judge cannot be asked: {reasons}. Its settings are: {', '.join(Judge.model_fields)}."
        ) from error
    except OSError as error:
        raise JudgeError(f"The judge's template cannot be read: {error}.") from error


def check(**settings: str) -> None:
    """Finds out whether the judge can be asked, without asking.

    Raises:
        JudgeError: it cannot.
        ModuleNotFoundError: openai is not installed.
    """
    make_judge(**settings)
    import_extra("openai", "judge")


@check_with(check)
async def score(
    prompts: Sequence[str | list[Message]],
    completions: Sequence[str | list[Message]],
    **given: str | Sequence[object],
) -> list[float | None]:
    """Returns the judge's score of each response, from 0 for `low` to 1 for `high`.

    A response whose score the judge does not tell in all tries gets None, which is an error of that sample's own.

    Args:
        prompts: what was asked.
        completions: the responses.
        given: the fields of `Judge`, as text; and the data's columns, one entry per response.

    Raises:
        JudgeError: the judge refuses or cannot be reached, or its template asks for what the data does not have.
    """
    from openai import AsyncOpenAI

    judge = make_judge(**{name: value for name, value in given.items() if isinstance(value, str)})
    columns = {name: value for name, value in given.items() if not isinstance(value, str)}
    turn = asyncio.Semaphore(judge.parallel)

    async def judged(index: int) -> float | None:
        values = {name: column[index] for name, column in columns.items()}
        values |= {"prompt": _text(prompts[index]), "completion": _text(completions[index])}
        try:
            question = judge.question.format_map(values)
        except KeyError as error:
            raise JudgeError(f"The judge's template asks for {error}, which the data does not have.") from error
        async with turn:
            return await _ask(judge, client, question)

    client = AsyncOpenAI(
        base_url=judge.url,
        api_key=os.environ.get(judge.key) or "EMPTY",  # without any, it would take the key of another variable
        timeout=judge.timeout,
        max_retries=judge.tries - 1,
    )
    try:
        async with client, asyncio.TaskGroup() as group:
            tasks = [group.create_task(judged(index)) for index in range(len(completions))]
    except ExceptionGroup as failed:  # the others were given up for it
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _ask(judge: Judge, client: "AsyncOpenAI", question: str) -> float | None:
    """Asks until there is a score, or all tries are used."""
    import openai

    for _ in range(judge.tries):
        try:
            reply = await client.chat.completions.create(
                model=judge.model,
                messages=[{"role": "user", "content": question}],
                temperature=0,
                max_tokens=judge.reply,
            )
        except openai.OpenAIError as error:
            reason = f"{type(error).__name__}: {error}"
            raise JudgeError(
                f"The judge at {judge.url} did not answer in up to {judge.tries} tries ({reason})."
            ) from error
        text = reply.choices[0].message.content or ""
        if scores := SCORE.findall(text):
            return min(max((float(scores[-1]) - judge.low) / (judge.high - judge.low), 0.0), 1.0)
        logger.warning("The judge gave no score: %r", text[-200:])
    return None


def _text(turn: str | list[Message]) -> str:
    return turn if isinstance(turn, str) else "\n".join(f"{message['role']}: {message['content']}" for message in turn)
