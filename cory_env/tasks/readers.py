"""Reads data row by row: JSON Lines, JSON, CSV, Parquet, and data sets of the Hugging Face hub.

A row that cannot be read stops the reading with its file and line: a silently dropped row would shift every query id
after it.
"""

import csv
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

Row = tuple[str, Mapping[str, object]]  # where it stands ("line 3", "row 3", from 1), and its columns


class DataError(ValueError):
    """A data file or data set cannot be used."""


def _read_json(name: str) -> Iterator[Row]:
    """Yields the objects of a JSON list, or of JSON Lines, one per line; both in UTF-8."""
    raw = _bytes(name)
    if raw.lstrip().startswith(b"["):
        objects = _parse(name, raw)
        assert isinstance(objects, list)
        rows = ((f"row {number}", value) for number, value in enumerate(objects, start=1))
    else:
        lines = enumerate(raw.rstrip().splitlines(), start=1)
        rows = ((f"line {number}", _parse(f"{name} line {number}", line)) for number, line in lines)
    for where, value in rows:
        if not isinstance(value, dict):
            raise DataError(
                f'{name} {where} is a JSON {type(value).__name__}, but must be an object such as {{"query": "..."}}.'
            )
        yield where, value


def _parse(where: str, raw: bytes) -> object:
    """Returns what a JSON text holds; `where` is what messages call it."""

    def to_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
        _refuse_twice(where, [key for key, _ in pairs])  # `json` would silently keep the last of two
        return dict(pairs)

    try:
        value: object = json.loads(raw.decode("utf-8"), object_pairs_hook=to_object)
        if b"\\u" in raw:
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # fails on half of a character
    except DataError:
        raise
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where} is not valid JSON in UTF-8: {error}. Write a list of objects, or one object on each line."
        ) from error
    return value


def _read_csv(name: str) -> Iterator[Row]:
    """Yields one row per record of a CSV file, UTF-8, whose first line names the columns; every value is text.

    An empty field is None, as other formats hold what is missing. A quoted field may hold commas and line breaks; a
    record is named by its first line.
    """
    raw = _bytes(name).rstrip(b"\r\n")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{name} line {line} is not UTF-8: {error}. Save the file as UTF-8.") from error
    csv.field_size_limit(max(len(raw), csv.field_size_limit()))  # by default a field has 131,072 characters at most
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    line = 1
    try:
        header = next(reader, [])
        _refuse_twice(f"{name} line 1", header)
        if not all(header):
            raise DataError(f"{name} line 1 must name every column, but has an empty name: {header}. Name it.")
        line = reader.line_num + 1
        for fields in reader:
            if len(fields) != len(header):
                raise DataError(
                    f"{name} line {line} has {len(fields)} fields, but the header names {len(header)} columns: "
                    f"{', '.join(header)}. Quote a field that holds a comma or a line break."
                )
            yield f"line {line}", {key: field or None for key, field in zip(header, fields, strict=True)}
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{name} line {line} is not valid CSV: {error}. Write a quote inside a quoted field twice."
        ) from error


def _refuse_twice(where: str, names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        name = next(name for name, count in Counter(names).items() if count > 1)
        raise DataError(f"{where} names {name!r} twice. Rename or remove one of them.")


def _read_parquet(name: str) -> Iterator[Row]:
    """Yields the rows of a Parquet file, a batch in memory at a time; numbers, lists and structs stay what they are."""
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(name) as file:
            columns = file.schema_arrow.names
            _refuse_twice(name, columns)
            for batch in file.iter_batches():
                for values in zip(*batch.columns, strict=True):
                    number += 1
                    row = {}
                    for column, value in zip(columns, values, strict=True):
                        try:
                            row[column] = value.as_py()
                        except (ArithmeticError, ValueError) as error:  # a year of 60,000, or text that is no UTF-8
                            raise DataError(
                                f"{name} row {number} holds a value in column {column!r} that cannot be read: {error}. "
                                "Correct it, or leave the column out."
                            ) from error
                    yield f"row {number}", row
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # a foreign or damaged file
        raise DataError(f"{name} cannot be read as Parquet, after {number} rows: {error}. Write it again.") from error


def _bytes(name: str) -> bytes:
    with open(name, "rb") as file:
        return file.read().removeprefix(b"\xef\xbb\xbf")


READERS: dict[str, Callable[[str], Iterator[Row]]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
"""By the ending of a file's name."""

HUB_SETTINGS = ("split", "config", "revision")


def read_hub(name: str, split: str = "train", config: str | None = None, revision: str | None = None) -> Iterator[Row]:
    """Yields the rows of one split, in the data set's order.

    Args:
        name: `OWNER/NAME` on the hub, or a folder laid out like one there, of data files.
        split: Its name, or part of it as the library writes it: `train[:1000]`, `test[10%:20%]`.
        config: The configuration (or subset), for data sets that have several.
        revision: A commit, tag or branch.

    Raises:
        DataError: The library is not installed, the hub cannot be reached, or it has no such data set, configuration,
            revision or split.
    """
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise DataError(
            f"The data set hub:{name} needs the library datasets: pip install 'cory-rllib[hub]'."
        ) from error
    if not name or (name.startswith((".", "/", "~")) and not os.path.isdir(name)):
        raise DataError(f"There is no data set hub:{name}. Write hub:OWNER/NAME, or hub: and an existing folder.")
    try:
        # Rows are decoded as they are read, which takes further libraries where there are images or sound.
        for number, row in enumerate(load_dataset(name, config, split=split, revision=revision), start=1):
            yield f"row {number}", row
    except Exception as error:  # the library raises what its many sources raise; all of it is about this data set
        asked = ", ".join(f"{k}={v}" for k, v in (("split", split), ("config", config), ("revision", revision)) if v)
        raise DataError(
            f"The data set hub:{name} ({asked}) cannot be loaded: {' '.join(str(error).split()).rstrip('.')}. Correct "
            "its name or settings, check the connection to the hub, or set data to a file."
        ) from error
