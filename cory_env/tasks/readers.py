"""Reads data files row by row: JSON Lines, CSV, Parquet.

A row that cannot be read stops the reading with its file and place: a silently dropped row would shift every query id
after it.
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyarrow import RecordBatch

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
            row = json.loads(raw.decode("utf-8"), object_pairs_hook=_object)
            if b"\\u" in raw:
                json.dumps(row, ensure_ascii=False).encode("utf-8")
        except RecursionError as error:
            raise DataError(
                f"{name} line {line} nests lists or objects too deeply to be read. Flatten it, or make it a text."
            ) from error
        except UnicodeEncodeError as error:
            half = json.dumps(error.object[error.start])
            raise DataError(
                f"{name} line {line} holds {half}, half of a character. Write both halves, or the character itself."
            ) from error
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise DataError(
                f"{name} line {line} is not valid JSON in UTF-8: {error}. Each line must be one JSON object."
            ) from error
        except _Twice as error:
            raise DataError(f"{name} line {line} names {error} twice. Rename or remove one of them.") from error
        except ValueError as error:
            raise DataError(
                f"{name} line {line} holds a whole number of more digits than can be read. Make it a text."
            ) from error
        if not isinstance(row, dict):
            raise DataError(
                f'{name} line {line} is a JSON {type(row).__name__}, but must be an object such as {{"query": "..."}}.'
            )
        yield f"line {line}", row


class _Twice(ValueError):
    """A key of a JSON object stands in it twice."""


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Makes a JSON object of its pairs; `json` would keep the last of two with one key without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _Twice(repr(next(key for key in keys if keys.count(key) > 1)))
    return found


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
    _check_columns(f"{name} line 1", header)


def _check_columns(where: str, columns: Sequence[str]) -> None:
    for column, count in Counter(columns).items():
        if count > 1:
            raise DataError(f"{where} names the column {column!r} twice. Rename or remove one of them.")


def _read_parquet(name: str) -> Iterator[Row]:
    """Yields the rows of a Parquet file, a batch in memory at a time; numbers, lists and structs stay what they are."""
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(name) as file:
            _check_columns(name, file.schema_arrow.names)
            for batch in file.iter_batches():
                for row in _to_python(batch, f"{name} row", number):
                    number += 1
                    yield f"row {number}", row
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # a foreign or damaged file
        raise DataError(f"{name} cannot be read as Parquet, after {number} rows: {error}. Write it again.") from error


def _to_python(batch: "RecordBatch", where: str, before: int) -> list[dict[str, object]]:
    """Returns the rows of a batch; finds the one that holds what Python has no value for.

    Raises:
        DataError: There is one, such as a time in the year 60,000 or text that is no UTF-8.
    """
    try:
        return batch.to_pylist()
    except (ArithmeticError, ValueError):  # those of Arrow among them
        for row in range(batch.num_rows):
            for column in batch.column_names:
                try:
                    batch.column(column)[row].as_py()
                except (ArithmeticError, ValueError) as error:
                    raise DataError(
                        f"{where} {before + row + 1} holds a value in column {column!r} that cannot be read: "
                        f"{error}. Correct it, or leave the column out."
                    ) from error
        raise


def _bytes(name: str) -> bytes:
    with open(name, "rb") as file:
        return file.read().removeprefix(b"\xef\xbb\xbf")


READERS: dict[str, Callable[[str], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
