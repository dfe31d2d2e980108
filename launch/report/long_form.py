"""The curves of runs as rows, one number each, as data frames and plotting libraries take them."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from launch.run_folder.records import Figures, Update

RUN_WIDE = ("tokens", "tokens_per_second", "exchanges", "exchanged", "averaged", "collapsed")
"""What is kept of a whole update."""


class Row(NamedTuple):
    """One number of one update; the names are the heading of the file."""

    run: str
    update: int
    of: str
    """What it was measured on: `training`, by policy or by role; `held_out`; `last_answer`, held out too; `run`."""
    policy: str
    """Or the role; `mean` is that of all policies. Empty where the figure is of none alone."""
    measure: str
    value: float


def rows(run: str, updates: Sequence[Update]) -> Iterator[Row]:
    """Yields the known numbers of a run's `metrics.jsonl`, by update."""
    for line in updates:
        update = line["update"]
        for of, group in (
            ("training", {**line.get("policy", {}), **line.get("role", {})}),
            ("held_out", line.get("evaluation", {})),
            ("last_answer", {"": line["last_answer"]} if "last_answer" in line else {}),
            ("run", {"": _run_wide(line)}),
        ):
            for policy, figures in group.items():
                for measure, value in figures.items():
                    if value is not None:
                        yield Row(run, update, of, policy, measure, value)


def _run_wide(line: Mapping[str, object]) -> Figures:
    found: Figures = {}
    for name in RUN_WIDE:
        if isinstance(value := line.get(name), bool | int | float):
            found[name] = value if isinstance(value, float) else int(value)
    seconds = line.get("seconds", {})
    return found | {f"seconds/{name}": value for name, value in dict(seconds).items()}  # type: ignore[call-overload]


def as_csv(runs: Mapping[str, Sequence[Update]]) -> str:
    """Returns the curves of runs, by the names that they are to have, as CSV with a heading."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row._fields)
    for name, updates in runs.items():
        writer.writerows(rows(name, updates))
    return text.getvalue()
