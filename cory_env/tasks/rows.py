"""Turns a data file or a hub data set into queries, splits them, and cuts long ones to their first tokens.

One row per query. The column `query` holds it, or another one named in the source; all other columns belong to the
reward and the templates. A query is text, or a conversation that ends with the user's turn, as a list of
`{"role": ..., "content": ...}` (in CSV as JSON); such queries need `chat`.

    questions.jsonl                                 also .json, .csv and .parquet
    questions.csv?query_column=question                    another column is the query
    hub:stanfordnlp/imdb?split=train&query_column=text     also config=… and revision=…; a folder instead of a name
    works too
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
from cory_env.home import HomeError, expand_home
from cory_env.message import Message
from cory_env.tasks.readers import HUB_SETTINGS, READERS, DataError, Row, read_hub
from cory_env.tasks.task import Query

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Source = str | os.PathLike[str]

HUB = "hub:"
QUERY = "query"
"""The query's column, by default."""
QUERY_COLUMN = "query_column"
"""The source setting that names another."""
RESERVED = ("prompts", "completions", "completion_ids", "role")  # what a reward receives besides the columns
HOLD_OUT_EVERY = 10
READ_AHEAD = 32  # characters per token: more than any text here needs, so that a long text is not tokenised whole
CONVERSATION = re.compile(
    r"""\s*\[\s*\{ (?=.*['"]role['"]\s*:) (?=.*['"]content['"]\s*:) .*\}\s*\]\s*""", re.DOTALL | re.VERBOSE
)
"""The text of a list of messages, in JSON or as Python writes it."""


def read_queries(source: Source, required: Collection[str] = (), column: str = QUERY) -> list[Query]:
    """Reads all queries of a source, numbered from 0 in its order.

    All have the same columns: one that a row lacks is None there, so a reward gets it or not whatever is scored beside.
    What is missing is None in all formats: null, NaN, an empty field of a CSV file.

    Args:
        source: A file, whose ending says the format, one of `READERS`; or `hub:` and a data set. Settings may follow.
        required: Columns besides the query that no row may lack (those that a prompt template or the reward uses).
        column: The column that holds the query, unless the source names another.

    Raises:
        DataError: The source is missing, empty or of an unknown format, or a row is malformed; names file and line.
    """
    name, settings = parse_source(source)
    column = settings.pop(QUERY_COLUMN, column)
    queries: list[Query] = []
    for place, values in _rows(name, settings):
        where = f"{name} {place}"
        row = {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in values.items()}
        _check_row(where, row, column, required)
        text, history = _read_query(where, column, row[column])
        columns = {key: value for key, value in row.items() if key != column}
        queries.append(Query(id=len(queries), text=text, columns=columns, history=history))
    if not queries:
        raise DataError(f"{name} has no rows. There must be one row per query.")
    names = dict.fromkeys(name for query in queries for name in query.columns)
    return [
        query if len(query.columns) == len(names) else replace(query, columns=dict.fromkeys(names) | query.columns)
        for query in queries
    ]


def columns_of(source: Source) -> list[str]:
    """Returns the columns of a source's first row; none where it has no rows.

    Raises:
        DataError: As of `read_queries`.
    """
    name, settings = parse_source(source)
    settings.pop(QUERY_COLUMN, None)
    return list(next(iter(_rows(name, settings)), ("", {}))[1])


def parse_source(source: Source) -> tuple[str, dict[str, str]]:
    """Splits a source into name and settings; `~` at the start of a path is the home directory.

    Raises:
        DataError: The settings are not `?name=value&...`, or one is unknown or stands twice; or there is no such home
            directory.
    """
    text = os.fspath(source)
    hub = HUB if text.startswith(HUB) else ""
    known = (QUERY_COLUMN, *HUB_SETTINGS) if hub else (QUERY_COLUMN,)
    try:
        name, settings = split_settings(text)
        name = hub + expand_home(name.removeprefix(hub))
    except HomeError as error:
        raise DataError(str(error)) from error
    except ValueError as error:
        raise DataError(
            f"The data {text!r}: {error}, such as {text.partition('?')[0]}?query_column=question."
        ) from error
    if unknown := [setting for setting in settings if setting not in known]:
        raise DataError(f"The data {text!r} has the setting {unknown[0]!r}. It may have: {', '.join(known)}.")
    return name, settings


def _rows(name: str, settings: Mapping[str, str]) -> Iterator[Row]:
    if name.startswith(HUB):
        return read_hub(name.removeprefix(HUB), **settings)
    if not os.path.isfile(name):
        raise DataError(
            f"There is no data file {name} (looked from {os.getcwd()}). Correct the path; a folder of data files is "
            "hub:FOLDER."
        )
    ending = os.path.splitext(name.lower())[1]
    if ending not in READERS:
        raise DataError(
            f"{name} is not data that can be read: a file's name must end in {', '.join(READERS)}, and a data set of "
            "the hub is written hub:OWNER/NAME."
        )
    return READERS[ending](name)


def _check_row(where: str, row: Mapping[str, object], query: str, required: Collection[str]) -> None:
    columns = ", ".join(row) or "no columns"
    if query not in row:
        raise DataError(
            f"{where} has no column {query!r} (it has {columns}). Add it: it holds the text to answer. Or name the "
            "column that does, after the data's name: ?query_column=COLUMN."
        )
    for column in required:
        if column != QUERY and (column == query or row.get(column) is None):
            raise DataError(
                f"{where} has no value in column {column!r}, which the prompts or the reward use (it has {columns}). "
                "Fill it in, or remove the row; the query itself is {query} in prompts."
            )
    for column in RESERVED:
        if column in row and column != query:
            raise DataError(f"{where}: the column name {column!r} is taken by the reward's own arguments. Rename it.")


def _read_query(where: str, column: str, value: object) -> tuple[str, tuple[Message, ...] | None]:
    """Returns a query's text and, where it is a conversation, the messages before it."""
    if isinstance(value, str) and CONVERSATION.fullmatch(value):  # CSV holds texts alone
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(
                f"{where}: {column!r} is a conversation, but not as JSON: {error}. Write it by json.dumps, or keep the "
                "data as JSON Lines or Parquet."
            ) from error
    if isinstance(value, str) and value.strip():
        return value, None
    if not isinstance(value, list):
        raise DataError(f"{where}: {column!r} is {value!r}, but must be text that is not empty.")
    messages: list[Message] = []
    for message in value:
        match message:
            case {"role": str(role), "content": str(content)} if not (
                message.get("tool_calls") or message.get("function_call")
            ):
                messages.append(Message(role=role, content=content))
            case _:
                raise DataError(
                    f"{where}: {column!r} is a conversation with {message!r}, but each message must be "
                    '{"role": ..., "content": ...} with texts; images and tool calls are not supported.'
                )
    if not messages or messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise DataError(f"{where}: {column!r} is a conversation, but does not end with what the user says.")
    return messages[-1]["content"], tuple(messages[:-1])


def hold_out(queries: Sequence[Query], source: str) -> tuple[list[Query], list[Query]]:
    """Splits queries into those to train on and held-out ones, each numbered anew.

    Rows 10, 20, 30, … are held out; of fewer than ten rows the last one. The choice depends on their order alone.

    Args:
        queries: All queries of a source.
        source: What messages call it.

    Raises:
        DataError: There is only one.
    """
    if len(queries) == 1:
        raise DataError(
            f"{source} has one row only, so none can be held out for evaluation. Add rows, or set eval_data."
        )
    every = min(HOLD_OUT_EVERY, len(queries))
    train = [query for query in queries if (query.id + 1) % every]
    return _numbered(train), _numbered([query for query in queries if not (query.id + 1) % every])


def choose_validation(held_out: Sequence[Query], most: int, alternately: bool) -> tuple[list[Query], list[Query]]:
    """Splits held-out queries into those by which training chooses and those on which figures are reported.

    Args:
        held_out: at least two.
        most: so many choose at most, and never more than half.
        alternately: take every second one, as where the order of one file says something; else the first ones.

    Returns:
        The two splits, each numbered anew.
    """
    chosen = {query.id for query in held_out[:: 2 if alternately else 1][: min(most, len(held_out) // 2)]}
    validation = [query for query in held_out if query.id in chosen]
    return _numbered(validation), _numbered([query for query in held_out if query.id not in chosen])


def _numbered(queries: list[Query]) -> list[Query]:
    return [replace(query, id=index) for index, query in enumerate(queries)]


def cut_queries(
    queries: Sequence[Query], tokenizer: "PreTrainedTokenizerBase", shortest: int, longest: int
) -> list[Query]:
    """Returns the queries, each cut to its first `shortest` to `longest` tokens.

    The lengths are drawn anew from the same seed at each call, so a data set gives the same queries in every process
    and whatever a run's seed is. A cut may fall inside a word, as the paper's do; one inside a character loses it,
    but the first character is kept whole.

    Args:
        queries: In the data's order.
        tokenizer: The tokenizer of the model that plays, in whose tokens lengths are counted.
        shortest: At least 1. A text that is shorter stays whole.
        longest: At least `shortest`.
    """
    lengths = random.Random(0)
    texts = [query.text.lstrip()[: longest * READ_AHEAD] for query in queries]
    tokens = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    cut = []
    for query, ids in zip(queries, tokens, strict=True):
        length = lengths.randint(shortest, longest)
        while not (opening := _opening(tokenizer, ids[:length])).strip() and length < len(ids):
            length += 1  # so far only a part of its first character
        cut.append(replace(query, text=opening))
    return cut


def _opening(tokenizer: "PreTrainedTokenizerBase", tokens: list[int]) -> str:
    text = str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
    return text.rstrip("\N{REPLACEMENT CHARACTER}")
