"""Reads queries from a data file or a hub data set, splits them, and truncates long ones.

Each row is a query, in the column `query` or another one named in the source. Rewards and templates can use all other
columns. A query is text, or a conversation that ends with a user message: a list of `{"role": ..., "content": ...}` (in
CSV as JSON). Conversations require `chat`.

    questions.jsonl                                        also .json, .csv and .parquet
    questions.csv?query_column=question                    another column for the query
    hub:stanfordnlp/imdb?split=train&query_column=text     also config=… and revision=…, or a folder as the name
    reasoning_gym:chain_sum?size=2000&seed=1               puzzles made by a program (`cory_env.tasks.reasoning_gym`)
"""

import json
import math
import os
import random
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cory_env.functions import split_settings
from cory_env.home import HomeError, expand_home, upload_hint
from cory_env.message import SURROGATE_PROBLEM, Message, has_surrogate, is_blank
from cory_env.tasks.readers import HUB_SETTINGS, READERS, DataError, LocatedRow, read_hub, read_reasoning_gym
from cory_env.tasks.task import Query

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Source = str | os.PathLike[str]

HUB, REASONING_GYM = "hub:", "reasoning_gym:"
QUERY = "query"
"""The default column of the query."""
QUERY_COLUMN = "query_column"
"""The source's setting for another column."""
RESERVED = ("prompts", "completions", "completion_ids", "role")  # arguments of a reward that are not columns
QUERY_ARGUMENT = "query"
"""An argument of a reward that gets the same as `prompts`, unless the data has another column of this name."""
PROVIDED_ARGUMENTS = (*RESERVED, QUERY_ARGUMENT)
"""Arguments of a reward that need no column."""
HOLD_OUT_EVERY, MIN_HOLD_OUT_EVERY = 10, 3
"""Of one file, every tenth row is held out; of a small one every k-th, at least every third, to get `MIN_HELD_OUT`."""
MIN_HELD_OUT = 40
"""Enough for 20 validation and 20 test queries."""
MAX_CHARACTERS_PER_TOKEN = 32  # upper estimate, so that long texts are not tokenized completely
CONVERSATION = re.compile(r"""\s*\[\s*\{.*['"]role['"]\s*:.*\}\s*\]\s*""", re.DOTALL)
"""The text of a list of messages, in JSON or in Python's notation."""


def read_queries(source: Source, required: Collection[str] = (), column: str = QUERY) -> list[Query]:
    """Reads all queries of a source, numbered from 0 in its order.

    All queries have the same columns; a column that a row lacks is None. So a reward's arguments do not depend on the
    other samples of its batch. Missing values are None in all formats: null, NaN, an empty field of a CSV file.

    Args:
        source: A file with an extension in `READERS`, or `hub:` and a data set. Settings may follow.
        required: Columns, apart from the query's, that every row must have because templates or the reward use them.
        column: The column of the query, unless the source names another.

    Raises:
        DataError: The source is missing, empty or in an unknown format, or a row is malformed. The message has file
            and line.
    """
    name, settings = parse_source(source)
    column = settings.pop(QUERY_COLUMN, column)
    queries: list[Query] = []
    for row_location, values in _read_rows(name, settings):
        location = f"{name} {row_location}"
        if has_surrogate(values):  # first, because other messages name the columns
            raise DataError(f"{location} {SURROGATE_PROBLEM}. Remove or replace the character.")
        row = {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in values.items()}
        _check_row(location, row, column, required)
        text, history = _read_query(location, column, row.pop(column))
        if has_surrogate([text, history]):  # JSON in a CSV file can spell one, too
            raise DataError(f"{location} {SURROGATE_PROBLEM}. Remove or replace the character.")
        queries.append(Query(id=len(queries), text=text, columns=row, history=history))
    if not queries:
        raise DataError(f"{name} has no rows. Add one row per query.")
    names = dict.fromkeys(name for query in queries for name in query.columns)
    return [replace(query, columns=dict.fromkeys(names) | query.columns) for query in queries]


def read_columns(source: Source) -> list[str]:
    """Returns the columns of a source's first row; an empty list if it has no rows.

    Raises:
        DataError: See `read_queries`.
    """
    name, settings = parse_source(source)
    settings.pop(QUERY_COLUMN, None)
    return list(next(iter(_read_rows(name, settings)), ("", {}))[1])


def parse_source(source: Source) -> tuple[str, dict[str, str]]:
    """Splits a source into name and settings; `~` at the start of a path is the home directory.

    Raises:
        DataError: The settings are not `?name=value&...`, or one is unknown or repeated, or the home directory does not
            exist.
    """
    text = os.fspath(source)
    hub = HUB if text.startswith(HUB) else ""
    valid_settings = (QUERY_COLUMN, *HUB_SETTINGS) if hub else (QUERY_COLUMN,)
    try:
        name, settings = split_settings(text)
        if name.startswith(REASONING_GYM):
            return name, settings
        name = hub + expand_home(name.removeprefix(hub))
    except HomeError as error:
        raise DataError(str(error)) from error
    except ValueError as error:
        raise DataError(
            f"Invalid data {text!r}: {error}, such as {text.partition('?')[0]}?query_column=question."
        ) from error
    if unknown := [setting for setting in settings if setting not in valid_settings]:
        raise DataError(
            f"The data {text!r} has the unknown setting {unknown[0]!r}. Valid settings: {', '.join(valid_settings)}."
        )
    return name, settings


def _read_rows(name: str, settings: Mapping[str, str]) -> Iterator[LocatedRow]:
    if name.startswith(HUB):
        return read_hub(name.removeprefix(HUB), **settings)
    if name.startswith(REASONING_GYM):
        return read_reasoning_gym(name.removeprefix(REASONING_GYM), **settings)
    if not os.path.isfile(name):
        raise DataError(
            f"Data file {name} not found in {os.getcwd()}. Correct the path; for a folder of data files, write "
            f"hub:FOLDER.{upload_hint(name)}"
        )
    extension = os.path.splitext(name.lower())[1]
    if extension not in READERS:
        raise DataError(
            f"{name} has an unknown data format. Use a file that ends in {', '.join(READERS)}, or hub:OWNER/NAME for a "
            "hub data set."
        )
    return READERS[extension](name)


def _check_row(location: str, row: Mapping[str, object], query: str, required: Collection[str]) -> None:
    columns = ", ".join(row) or "no columns"
    if query not in row:
        raise DataError(
            f"{location} has no column {query!r} (it has {columns}). Add it, or name the query's column after the "
            "data's name: ?query_column=COLUMN."
        )
    for column in required:
        if column != QUERY and (column == query or row.get(column) is None):
            raise DataError(
                f"{location} has no value in column {column!r}, which the prompts or the reward require (it has "
                f"{columns}). Fill it in, or remove the row; in prompts, the query itself is {{query}}."
            )
    for column in RESERVED:
        if column in row and column != query:
            raise DataError(f"{location}: the column {column!r} conflicts with an argument of rewards. Rename it.")


def _read_query(location: str, column: str, value: object) -> tuple[str, tuple[Message, ...] | None]:
    """Returns a query's text and, if it is a conversation, the messages before it."""
    if isinstance(value, str) and CONVERSATION.fullmatch(value):  # CSV has only texts
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(
                f"{location}: {column!r} is a conversation, but not valid JSON: {error}. Write it with json.dumps, or "
                "use JSON Lines or Parquet."
            ) from error
    if isinstance(value, str) and not is_blank(value):
        return value, None
    if not isinstance(value, list):
        raise DataError(f"{location}: {column!r} is {value!r}, but must be non-empty text.")
    messages: list[Message] = []
    for message in value:
        match message:
            case {"role": str(role), "content": str(content)} if not (
                message.get("tool_calls") or message.get("function_call")
            ):
                messages.append(Message(role=role, content=content))
            case _:
                raise DataError(
                    f"{location}: {column!r} is a conversation with the message {message!r}, but each message must be "
                    '{"role": ..., "content": ...} with text values; images and tool calls are not supported.'
                )
    if not messages or messages[-1]["role"] != "user" or is_blank(messages[-1]["content"]):
        raise DataError(f"{location}: {column!r} is a conversation, but does not end with a user message.")
    return messages[-1]["content"], tuple(messages[:-1])


def hold_out(queries: Sequence[Query], source: str) -> tuple[list[Query], list[Query]]:
    """Splits queries into training queries and held-out queries, each renumbered from 0.

    Rows 10, 20, 30, … are held out. If these are fewer than `MIN_HELD_OUT`, rows k, 2k, 3k, … are, with the largest k
    that suffices, but at least 3, or the last one of two rows. The split depends only on the order.

    Args:
        queries: All queries of a source.
        source: The source's name in messages.

    Raises:
        DataError: There is only one query.
    """
    if len(queries) == 1:
        raise DataError(
            f"{source} has only one row, so none can be held out for evaluation. Add rows, or set eval_data."
        )
    every = min(max(len(queries) // MIN_HELD_OUT, MIN_HOLD_OUT_EVERY), HOLD_OUT_EVERY, len(queries))
    train = [query for query in queries if (query.id + 1) % every]
    return _renumber(train), _renumber([query for query in queries if not (query.id + 1) % every])


def choose_validation(held_out: Sequence[Query], count: int, alternately: bool) -> tuple[list[Query], list[Query]]:
    """Splits held-out queries into the splits `validation` and `test`.

    Args:
        held_out: At least two queries.
        count: Number of validation queries; reduced to half of `held_out` if larger.
        alternately: Take every second query, in case the order of the file matters; otherwise take the first ones.

    Returns:
        The two splits, each renumbered from 0.
    """
    ids = {query.id for query in held_out[:: 2 if alternately else 1][: min(count, len(held_out) // 2)]}
    validation = [query for query in held_out if query.id in ids]
    return _renumber(validation), _renumber([query for query in held_out if query.id not in ids])


def _renumber(queries: list[Query]) -> list[Query]:
    return [replace(query, id=index) for index, query in enumerate(queries)]


def truncate_queries(
    queries: Sequence[Query], tokenizer: "PreTrainedTokenizerBase", min_tokens: int, max_tokens: int
) -> list[Query]:
    """Truncates each query to a random length of `min_tokens` to `max_tokens` tokens.

    The lengths are drawn with a fixed seed, so a data set gives the same queries in every process and for every seed of
    a run. Truncation may split a word, as in the paper. It drops a split character, except the first one, which is
    always complete.

    Args:
        queries: The queries, in the data's order.
        tokenizer: The tokenizer that determines lengths.
        min_tokens: At least 1. Shorter texts stay unchanged.
        max_tokens: At least `min_tokens`.
    """
    rng = random.Random(0)
    texts = [query.text.lstrip()[: max_tokens * MAX_CHARACTERS_PER_TOKEN] for query in queries]
    tokens = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    truncated = []
    for query, ids in zip(queries, tokens, strict=True):
        length = rng.randint(min_tokens, max_tokens)
        while is_blank(text := _decode_prefix(tokenizer, ids[:length])) and length < len(ids):
            length += 1  # so far only a part of the first character
        truncated.append(replace(query, text=text))
    return truncated


def _decode_prefix(tokenizer: "PreTrainedTokenizerBase", tokens: list[int]) -> str:
    text = str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
    return text.rstrip("\N{REPLACEMENT CHARACTER}")
