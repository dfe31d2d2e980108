"""Reads data files row by row: JSON Lines, CSV, Parquet.

A row that cannot be read stops the reading with its file and place: a silently dropped row would shift every query id
after it.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping

Row = tuple[str, Mapping[str, object]]  # where it stands ("line 3", "row 3", from 1), and its columns


class DataError(ValueError):
    """A data file or data set cannot be used."""


def _read_jsonl(name: str) -> Iterator[Row]:
    """Yields one row per line of a JSON Lines file, UTF-8; blank lines are allowed at the end only."""
    lines = _bytes(name).rstrip().split(b"\n")
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
        yield f"line {line}", row


def _read_csv(name: str) -> Iterator[Row]:
    """Yields one row per record of a CSV file, UTF-8, whose first line names the columns; every value is text.

    A quoted field may hold commas and line breaks; a record is named by its first line.
    """
    raw = _bytes(name).rstrip(b"\r\n")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{name} line {line} is not UTF-8: {error}. Save the file as UTF-8.") from error
    if not text:
        return
    csv.field_size_limit(max(len(raw), csv.field_size_limit()))  # by default a field has 131,072 characters at most
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] = []
    line = 1
    try:
        for fields in reader:
            if line == 1:
                header = fields
                _check_header(name, header)
            elif len(fields) != len(header):
                raise DataError(
                    f"{name} line {line} has {len(fields)} fields, but the header names {len(header)} columns: "
                    f"{', '.join(header)}. Quote a field that holds a comma or a line break."
                )
            else:
                yield f"line {line}", dict(zip(header, fields, strict=True))
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{name} line {line} is not valid CSV: {error}. Write a quote inside a quoted field twice."
        ) from error


def _check_header(name: str, header: list[str]) -> None:
    if not all(column.strip() for column in header):
        raise DataError(
            f"{name} line 1 must name every column, but has an empty name: {header}. Name it, or remove it."
        )
    for column in header:
        if header.count(column) > 1:
            raise DataError(f"{name} line 1 names the column {column!r} twice. Rename or remove one of them.")


def _read_parquet(name: str) -> Iterator[Row]:
    """Yields the rows of a Parquet file, a batch in memory at a time; numbers, lists and structs stay what they are."""
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(name) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except (pyarrow.ArrowException, OSError) as error:  # a foreign or damaged file, a type that Python has no value for
        raise DataError(f"{name} cannot be read as Parquet, after {number} rows: {error}. Write it again.") from error


def _bytes(name: str) -> bytes:
    with open(name, "rb") as file:
        return file.read().removeprefix(b"\xef\xbb\xbf")


READERS: dict[str, Callable[[str], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
