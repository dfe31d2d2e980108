"""Reads data row by row: JSON Lines, JSON, CSV, Parquet, and data sets of the Hugging Face hub and of reasoning-gym.

A row that cannot be read raises an error with file and line. Dropping it would shift all later query ids.
"""

import csv
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from urllib.parse import quote

from cory_env.home import upload_hint
from cory_env.rewards.reasoning_gym import read_entries

LocatedRow = tuple[str, Mapping[str, object]]  # its location ("line 3", "row 3", from 1), and its columns


class DataError(ValueError):
    """A data file or data set cannot be used."""


def _read_json(name: str) -> Iterator[LocatedRow]:
    """Yields the objects of a JSON list, or of JSON Lines, one per line."""
    text = _read_text(name)
    if text.lstrip().startswith("["):
        objects = _parse(name, text)
        assert isinstance(objects, list)
        rows = ((f"row {number}", value) for number, value in enumerate(objects, start=1))
    else:
        lines = enumerate(text.rstrip().split("\n") if text.strip() else (), start=1)
        rows = ((f"line {number}", _parse(f"{name} line {number}", line)) for number, line in lines)
    for location, value in rows:
        if not isinstance(value, dict):
            raise DataError(
                f'{name} {location} is a JSON {type(value).__name__}, but must be an object such as {{"query": "..."}}.'
            )
        yield location, value


def _parse(location: str, text: str) -> object:
    def to_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
        _reject_duplicates(location, [key for key, _ in pairs])  # `json` would silently keep the last one
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=to_object)
    except DataError:
        raise
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{location} is not valid JSON: {error}. Write a list of objects, or one object on each line."
        ) from error


def _read_csv(name: str) -> Iterator[LocatedRow]:
    """Yields one row per record of a CSV file. The first line names the columns; every value is text.

    An empty field becomes None, like missing values in other formats. A quoted field may contain commas and line
    breaks; a record's location is its first line.
    """
    text = _read_text(name).rstrip("\r\n")
    csv.field_size_limit(max(len(text), csv.field_size_limit()))  # the default is 131,072 characters
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    line = 1
    try:
        header = next(reader, [])
        _reject_duplicates(f"{name} line 1", header)
        if not all(header):
            raise DataError(f"{name} line 1 must name every column, but has an empty name: {header}.")
        line = reader.line_num + 1
        for fields in reader:
            if len(fields) != len(header):
                raise DataError(
                    f"{name} line {line} has {len(fields)} fields, but the header names {len(header)} columns: "
                    f"{', '.join(header)}. Quote fields that contain a comma or a line break."
                )
            yield f"line {line}", {key: field or None for key, field in zip(header, fields, strict=True)}
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{name} line {line} is not valid CSV: {error}. Double the quotes inside quoted fields."
        ) from error


def _reject_duplicates(location: str, names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        name = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{location} repeats the name {name!r}. Rename or remove one of them.")


def _read_parquet(name: str) -> Iterator[LocatedRow]:
    """Yields the rows of a Parquet file, with one batch in memory at a time; keeps numbers, lists and structs."""
    import pyarrow
    from pyarrow import parquet

    number = 1
    try:
        with parquet.ParquetFile(name) as file:
            _reject_duplicates(name, file.schema_arrow.names)
            for batch in file.iter_batches():
                for index in range(batch.num_rows):
                    (row,) = batch.slice(index, 1).to_pylist()
                    yield f"row {number}", row
                    number += 1
    except DataError:
        raise
    # A foreign or damaged file, or a value such as the year 60,000.
    except (pyarrow.ArrowException, OSError, ValueError, ArithmeticError) as error:
        raise DataError(
            f"{name} row {number} cannot be read as Parquet: {error}. Correct the value, or recreate the file."
        ) from error


def _read_text(name: str) -> str:
    with open(name, "rb") as file:
        raw = file.read()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(f"{name} line {line} is not UTF-8: {error}. Save the file as UTF-8.") from error


READERS: dict[str, Callable[[str], Iterator[LocatedRow]]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
"""Readers by file extension."""

HUB_SETTINGS = ("split", "config", "revision")


def read_hub(
    name: str, split: str = "train", config: str | None = None, revision: str | None = None
) -> Iterator[LocatedRow]:
    """Yields the rows of one split, in the data set's order.

    Args:
        name: `OWNER/NAME` on the hub, or a folder of data files with the same layout.
        split: The split, or a slice in the notation of `datasets`: `train[:1000]`, `test[10%:20%]`.
        config: The configuration (or subset), for data sets with several.
    """
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise DataError(
            f"The data set hub:{name} requires the package datasets: pip install 'cory-rllib[hub]'."
        ) from error
    if not name or (name.startswith((".", "/", "~")) and not os.path.isdir(name)):
        raise DataError(
            f"Data set hub:{name} not found. Write hub:OWNER/NAME, or hub: and an existing folder.{upload_hint(name)}"
        )
    try:
        # Rows are decoded one at a time; images and sound require further packages.
        for number, row in enumerate(load_dataset(name, config, split=split, revision=revision), start=1):
            yield f"row {number}", row
    except Exception as error:  # the library raises errors of many kinds, all about this data set
        options = ", ".join(f"{k}={v}" for k, v in (("split", split), ("config", config), ("revision", revision)) if v)
        raise DataError(
            f"The data set hub:{name} ({options}) cannot be loaded: {' '.join(str(error).split()).rstrip('.')}. "
            "Correct its name or settings, check the connection to the hub, or set data to a file."
            f"{upload_hint(name)}"
        ) from error


def read_reasoning_gym(name: str, **settings: str) -> Iterator[LocatedRow]:
    """Yields the rows of a data set of reasoning-gym, or of a mixture, with the columns that its reward requires.

    Args:
        name: Of the data set.
        settings: Its settings, as text.
    """
    source = name + "".join(
        f"{'&' if index else '?'}{key}={quote(value)}" for index, (key, value) in enumerate(settings.items())
    )
    try:
        entries = read_entries(source)
    except (ModuleNotFoundError, ValueError) as error:
        raise DataError(f"The data reasoning_gym:{source} cannot be used: {str(error).rstrip('.')}.") from error
    for number, entry in enumerate(entries, start=1):
        yield (
            f"row {number}",
            {
                "query": entry["question"],
                "answer": entry["answer"],
                "metadata": entry["metadata"],
                "dataset": source,
            },
        )
