"""Reads data row by row: JSON Lines, JSON, CSV, TSV (also by gzip), Parquet, and data sets of the Hugging Face hub.

A row that cannot be read stops the reading with its file and place: a silently dropped row would shift every query id
after it.
"""

import csv
import gzip
import io
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset
    from pyarrow import RecordBatch

Row = tuple[str, Mapping[str, object]]  # where it stands ("line 3", "row 3", from 1), and its columns


TAB = "\t"
GZIP = ".gz"


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
        yield f"line {line}", _row(f"{name} line {line}", _parse(f"{name} line {line}", raw, "Each line must be one"))


def _read_json(name: str) -> Iterator[Row]:
    """Yields the objects in a JSON list, UTF-8; a file that does not begin with a list is read as JSON Lines."""
    raw = _bytes(name)
    if not raw.lstrip().startswith(b"["):
        yield from _read_jsonl(name)
        return
    rows = _parse(name, raw, "The file must be a list of objects, or have one per line: each")
    assert isinstance(rows, list)
    for number, row in enumerate(rows, start=1):
        yield f"row {number}", _row(f"{name} row {number}", row)


def _parse(where: str, raw: bytes, form: str) -> object:
    """Returns what a JSON text holds.

    Args:
        where: What messages call it.
        raw: The text.
        form: What it should be, as a message says it before "JSON object".
    """

    def to_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
        values = dict(pairs)
        if len(values) < len(pairs):  # `json` would silently keep the last of two
            _refuse_twice(where, [key for key, _ in pairs])
        return values

    try:
        value: object = json.loads(raw.decode("utf-8"), object_pairs_hook=to_object)
        if b"\\u" in raw:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise DataError(
            f"{where} nests lists or objects too deeply to be read. Flatten it, or make it a text."
        ) from error
    except UnicodeEncodeError as error:
        half = json.dumps(error.object[error.start])
        raise DataError(
            f"{where} holds {half}, half of a character. Write both halves, or the character itself."
        ) from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{where} is not valid JSON in UTF-8: {error}. {form} JSON object.") from error
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{where} holds a whole number of more digits than can be read. Make it a text.") from error
    return value


def _row(where: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise DataError(f'{where} is a JSON {type(value).__name__}, but must be an object such as {{"query": "..."}}.')
    return value


def _read_csv(name: str, delimiter: str = ",") -> Iterator[Row]:
    """Yields one row per record of a CSV file, UTF-8, whose first line names the columns; every value is text.

    An empty field is None, as other formats hold what is missing. A quoted field may hold delimiters and line breaks; a
    record is named by its first line.
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
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=delimiter)
    header: list[str] = []
    line = 1
    try:
        for fields in reader:
            if line == 1:
                header = fields
                _check_header(name, header, delimiter)
            elif len(fields) != len(header):
                mark = "a tab" if delimiter == TAB else "a comma"
                raise DataError(
                    f"{name} line {line} has {len(fields)} fields, but the header names {len(header)} columns: "
                    f"{', '.join(header)}. Quote a field that holds {mark} or a line break."
                )
            else:
                yield f"line {line}", {key: field or None for key, field in zip(header, fields, strict=True)}
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{name} line {line} is not valid CSV: {error}. Write a quote inside a quoted field twice."
        ) from error


def _check_header(name: str, header: list[str], delimiter: str) -> None:
    for other, word in ((";", "semicolons"), (TAB, "tabs"), (",", "commas")):
        if len(header) == 1 and other in header[0] and other != delimiter:
            raise DataError(
                f"{name} line 1 names a single column, {header[0]!r}, so the file seems to be separated by {word}. "
                f"Separate it by {'tabs' if delimiter == TAB else 'commas (or by tabs, as FILE.tsv)'}."
            )
    if not all(column.strip() for column in header):
        raise DataError(
            f"{name} line 1 must name every column, but has an empty name: {header}. Name it, or remove it."
        )
    _refuse_twice(f"{name} line 1", header)


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
            _refuse_twice(name, file.schema_arrow.names)
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
        raw = file.read()
    if name.lower().endswith(GZIP):
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{name} cannot be decompressed: {error}. Compress it again.") from error
    return raw.removeprefix(b"\xef\xbb\xbf")


READERS: dict[str, Callable[[str], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": partial(_read_csv, delimiter=TAB),
    ".parquet": _read_parquet,
}
"""By the ending of a file's name; `GZIP` may follow that of a text."""


HUB_SETTINGS = ("split", "config", "revision")


def read_hub(name: str, split: str = "train", config: str | None = None, revision: str | None = None) -> Iterator[Row]:
    """Yields the rows of one split, in the data set's order.

    Args:
        name: `OWNER/NAME` on the hub, or a folder: laid out like one there, of data files, or as `save_to_disk` writes.
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
        if any(os.path.isfile(os.path.join(name, file)) for file in ("state.json", "dataset_dict.json")):
            rows = _load_saved(name, split, config or revision)
        else:
            rows = load_dataset(name, config, split=split, revision=revision)
        # Rows are decoded as they are read, which takes further libraries where there are images or sound.
        for number, row in enumerate(rows, start=1):
            yield f"row {number}", row
    except Exception as error:  # the library raises what its many sources raise; all of it is about this data set
        asked = ", ".join(f"{k}={v}" for k, v in (("split", split), ("config", config), ("revision", revision)) if v)
        raise DataError(
            f"The data set hub:{name} ({asked}) cannot be loaded: {' '.join(str(error).split()).rstrip('.')}. Correct "
            "its name or settings, check the connection to the hub, or set data to a file."
        ) from error


def _load_saved(folder: str, split: str, other: str | None) -> "Dataset":
    """Returns a split of what `save_to_disk` wrote.

    Raises:
        ValueError: There is no such split, or an `other` setting, which only data sets of other forms have.
    """
    from datasets import DatasetDict, load_from_disk

    saved = load_from_disk(folder)
    splits = saved if isinstance(saved, DatasetDict) else {"train": saved}
    if other or split not in splits:
        raise ValueError(
            f"save_to_disk wrote it with the splits {', '.join(splits)}; these have no parts, configurations, revisions"
        )
    return splits[split]
