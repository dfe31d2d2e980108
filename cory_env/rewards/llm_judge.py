"""LLM as a judge: a language model behind an OpenAI-compatible API scores responses.

    cory_env.rewards.llm_judge:score?url=http://localhost:8000/v1&model=Qwen/Qwen3-32B&template=judge.txt

The judge gets one request per response. The last `Score: N` of its reply counts, rescaled to 0 to 1. The API key is
read from the environment variable OPENAI_API_KEY, or from the one that `key` names; if it is unset, EMPTY is sent.
Requires the package openai (extra `judge`), which also retries failed requests.
"""

import asyncio
import logging
import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from cory_env.message import Message
from cory_env.rewards.prepared import check_with, import_extra

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
    """The judge's settings are invalid, or its template does not fit the data."""


class Judge(BaseModel, frozen=True, extra="forbid"):
    """Settings of the judge; every field is a setting in the reward's name.

    Attributes:
        url: Base URL of the API, up to `/v1`.
        model: The model's name in the API.
        key: The environment variable with the API key.
        template: A file with the judge's prompt, with `{prompt}`, `{completion}` and columns of the data.
        low: The lowest score; its reward is 0.
        high: The highest score; its reward is 1.
        parallel: Maximum number of concurrent requests.
        tries: Maximum number of replies per response until one has a score, and of requests per reply.
        timeout: Seconds that one request may take.
        reply: Maximum number of tokens of a reply.
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
    def template_text(self) -> str:
        """The template of the judge's prompt."""
        return TEMPLATE if self.template is None else self.template.read_text(encoding="utf-8")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.low < self.high:
            raise ValueError("low must be below high")
        if "{completion}" not in self.template_text:
            raise ValueError("the template has no {completion}")
        return self


def make_judge(**settings: str) -> Judge:
    """Makes a judge from settings given as text, without a request.

    Raises:
        JudgeError: A setting is unknown, missing or invalid, or the template cannot be read.
        ModuleNotFoundError: openai is not installed.
    """
    import_extra("openai", "judge")
    try:
        return Judge.model_validate(settings)
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, item['loc']))} {item['msg']}".strip() for item in error.errors())
        raise JudgeError(
            f"Invalid settings of the judge: {reasons}. Its settings are: {', '.join(Judge.model_fields)}."
        ) from error
    except OSError as error:
        raise JudgeError(f"The judge's template cannot be read: {error}.") from error


@check_with(make_judge)
async def score(
    prompts: Sequence[str | list[Message]],
    completions: Sequence[str | list[Message]],
    **settings_and_columns: str | Sequence[object],
) -> list[float | None]:
    """Returns the judge's score of each response, from 0 for `low` to 1 for `high`.

    A response gets None, an error of this sample only, if no reply of the judge has a score.

    Args:
        prompts: The queries.
        completions: The responses.
        settings_and_columns: The fields of `Judge`, as text; and the columns of the data, one entry per response.

    Raises:
        JudgeError: The template requires a column that the data does not have.
    """
    judge = make_judge(**{name: value for name, value in settings_and_columns.items() if isinstance(value, str)})
    columns = {name: value for name, value in settings_and_columns.items() if not isinstance(value, str)}
    semaphore = asyncio.Semaphore(judge.parallel)

    async def judge_response(index: int) -> float | None:
        values = {name: column[index] for name, column in columns.items()}
        values |= {"prompt": _text(prompts[index]), "completion": _text(completions[index])}
        try:
            prompt = judge.template_text.format_map(values)
        except KeyError as error:
            raise JudgeError(f"The judge's template requires {error}, but the data has no such column.") from error
        async with semaphore:
            for _ in range(judge.tries):
                reply = await client.chat.completions.create(
                    model=judge.model,
                    messages=[{"role": "user", "content": prompt}],
                    temperature=0,
                    max_tokens=judge.reply,
                )
                text = reply.choices[0].message.content or ""
                if scores := SCORE.findall(text):
                    return min(max((float(scores[-1]) - judge.low) / (judge.high - judge.low), 0.0), 1.0)
                logger.warning("The judge gave no score: %r", text[-200:])
        return None

    client = import_extra("openai", "judge").AsyncOpenAI(
        base_url=judge.url,
        api_key=os.environ.get(judge.key) or "EMPTY",  # with None, the client would use the key of another variable
        timeout=judge.timeout,
        max_retries=judge.tries - 1,
    )
    try:
        async with client, asyncio.TaskGroup() as group:
            tasks = [group.create_task(judge_response(index)) for index in range(len(completions))]
    except ExceptionGroup as errors:  # the first error has cancelled the other requests
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _text(value: str | list[Message]) -> str:
    if isinstance(value, str):
        return value
    return "\n".join(f"{message['role']}: {message['content']}" for message in value)
