"""Reads a data file into queries, and holds rows out where no held-out file is given.

A file holds one row per query. The column `query` is required; all other columns belong to the reward and the
templates. A row that cannot be used stops the reading with its file and line: a silently dropped row would shift every
query id after it.
"""

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping

from cory_env.tasks.task import Query

Path = str | os.PathLike[str]
Row = tuple[int, Mapping[str, object]]  # line number from 1, columns

RESERVED = ("prompts", "completions", "role")  # the names that a reward receives besides the columns
HOLD_OUT_EVERY = 10


class DataError(ValueError):
    """A data file cannot be used."""


def read_queries(path: Path, required: Collection[str] = ()) -> list[Query]:
    """Reads all queries of a file, numbered from 0 in the file's order.

    Args:
        path: The file; the ending of its name says the format, one of `READERS`.
        required: Columns besides `query` that no row may lack (those that a prompt template uses).

    Raises:
        DataError: The file is missing, empty or of an unknown format, or a row is malformed; names file and line.
    """
    name = os.fspath(path)
    ending = os.path.splitext(name)[1].lower()
    if ending not in READERS:
        raise DataError(f"{name} is not a data file that can be read: its name must end in {' or '.join(READERS)}.")
    if not os.path.isfile(name):
        raise DataError(f"There is no data file {name} (looked from {os.getcwd()}). Correct the path.")
    queries: list[Query] = []
    for line, row in READERS[ending](name):
        _check_row(name, line, row, required)
        columns = {column: value for column, value in row.items() if column != "query"}
        queries.append(Query(id=len(queries), text=str(row["query"]), columns=columns))
    if not queries:
        raise DataError(f"{name} has no rows. A data file needs one row per query.")
    return queries


def _check_row(name: str, line: int, row: Mapping[str, object], required: Collection[str]) -> None:
    columns = ", ".join(row) or "no columns"
    if "query" not in row:
        raise DataError(
            f"{name} line {line} has no column 'query' (it has {columns}). Add it: it holds the text to answer."
        )
    query = row["query"]
    if not isinstance(query, str) or not query.strip():
        raise DataError(f"{name} line {line}: 'query' is {query!r}, but must be text that is not empty.")
    for column in required:
        if column != "query" and row.get(column) is None:
            raise DataError(
                f"{name} line {line} has no value in column {column!r}, which a prompt template uses "
                f"(it has {columns})."
            )
    for column in RESERVED:
        if column in row:
            raise DataError(
                f"{name} line {line}: the column name {column!r} is taken by the reward's own arguments. Rename it."
            )


def _read_jsonl(name: str) -> Iterator[Row]:
    """Yields one row per line of a JSON Lines file, UTF-8; blank lines are allowed at the end only."""
    with open(name, "rb") as file:
        lines = file.read().removeprefix(b"\xef\xbb\xbf").rstrip().split(b"\n")
    if lines == [b""]:
        return
    for line, raw in enumerate(lines, start=1):
        if not raw.strip():
            raise DataError(f"{name} line {line} is empty. Remove it, or write a JSON object with the column 'query'.")
        try:
            row = json.loads(raw.decode("utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise DataError(
                f"{name} line {line} is not valid JSON in UTF-8: {error}. Each line must be one JSON object."
            ) from error
        if not isinstance(row, dict):
            raise DataError(
                f'{name} line {line} is a JSON {type(row).__name__}, but must be an object such as {{"query": "..."}}.'
            )
        yield line, row


READERS: dict[str, Callable[[str], Iterator[Row]]] = {".jsonl": _read_jsonl}


def read_splits(data: Path, eval_data: Path | None, required: Collection[str] = ()) -> tuple[list[Query], list[Query]]:
    """Reads the training queries from `data` and the held-out ones from `eval_data`.

    Without `eval_data`, rows 10, 20, 30, … of `data` are held out (the last row, where there are fewer than ten), and
    the rows of each split are numbered anew. The choice depends on the order of the file alone.

    Raises:
        DataError: A file cannot be used, or `data` has a single row and there is no `eval_data`.
    """
    queries = read_queries(data, required)
    if eval_data is not None:
        return queries, read_queries(eval_data, required)
    if len(queries) == 1:
        raise DataError(
            f"{os.fspath(data)} has one row only, so none can be held out for evaluation. Add rows, or set eval_data."
        )
    every = min(HOLD_OUT_EVERY, len(queries))
    train = [query for query in queries if (query.id + 1) % every]
    test = [query for query in queries if not (query.id + 1) % every]
    return _numbered(train), _numbered(test)


def _numbered(queries: list[Query]) -> list[Query]:
    return [Query(id=index, text=query.text, columns=query.columns) for index, query in enumerate(queries)]
