"""The metrics of runs as one long data frame, a row per number, which all tables and plots of runs group and pivot.

run, seed, update
split    `train`: training responses; `validation`: held-out evaluations in training; `test`: the evaluation after
         training; `run`: what is of no split, as tokens and seconds
policy   which LLM, in evaluations alone on bare queries; `mean`: the mean of the policies; empty: the figure is of none
role     of training responses in one role, whichever LLM played it; `last answer`: the chain's, held out; else empty
metric, value
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import pandas as pd

from launch.display.statistics import Estimate, column_cis
from launch.run_folder.records import Figures, Update, mean_over_policies

FRAME_COLUMNS = ("run", "seed", "update", "split", "policy", "role", "metric", "value")
MEAN, LAST = "mean", "last answer"
TOKEN_KL = "token_kl"
"""The metric of a policy's KL per token, as health has it."""
RUN_WIDE = ("tokens", "tokens_per_second", "exchanges", "exchanged", "averaged", "collapsed")
"""What the frame has of a whole update."""
MIN_SEEDS = 3
"""Seeds from which on an interval is drawn; with two, Student's t makes it 13 standard errors to either side."""

FrameRow = tuple[int, str, str, str, str, float | None]
"""From the update on."""


def metric_rows(updates: Sequence[Update], final: Mapping[str, Any] | None = None) -> Iterator[FrameRow]:
    """Yields what was measured of one run.

    Args:
        updates: the lines of `metrics.jsonl`.
        final: the `policy`, `mean`, `last_response` and `influence` after an `update`, the last one.
    """
    for line in updates:
        policies = line.get("policy", {})
        learned = {policy: {**figures, TOKEN_KL: _token_kl(figures)} for policy, figures in policies.items()}
        groups = [("train", policy, "", figures) for policy, figures in learned.items()]
        if learned:
            groups.append(("train", MEAN, "", mean_over_policies(list(learned.values()))))
        groups += [("train", "", role, figures) for role, figures in line.get("role", {}).items()]
        groups += [("validation", policy, "", figures) for policy, figures in line.get("evaluation", {}).items()]
        if "last_response" in line:
            groups.append(("validation", "", LAST, line["last_response"]))
        groups.append(("run", "", "", _run_wide(line)))
        yield from _rows(line["update"], groups)
    if final is not None:
        groups = [("test", policy, "", figures) for policy, figures in {**final["policy"], MEAN: final["mean"]}.items()]
        groups.append(("test", "", LAST, final.get("last_response", {})))
        groups.append(("test", "", "", {"influence": final["influence"]["share"]} if "influence" in final else {}))
        yield from _rows(final["update"], groups)


def _rows(update: int, groups: Sequence[tuple[str, str, str, Figures]]) -> Iterator[FrameRow]:
    for split, policy, role, figures in groups:
        for metric, value in figures.items():
            yield update, split, policy, role, metric, value


def _token_kl(figures: Figures) -> float | None:
    kl, length = figures.get("kl"), figures.get("response_length")
    return None if kl is None or length is None else kl / max(length, 1.0)


def _run_wide(line: Update) -> Figures:
    values: dict[str, Any] = {name: line[name] for name in RUN_WIDE if name in line}  # type: ignore[literal-required]
    seconds = {f"seconds/{name}": value for name, value in line.get("seconds", {}).items()}
    return {name: int(value) if isinstance(value, bool) else value for name, value in values.items()} | seconds


def as_csv(runs: Mapping[str, Sequence[Update]]) -> str:
    """Returns the curves of runs, by the names that they are to have, as CSV with a heading."""
    rows = [(run, 0, *row) for run, updates in runs.items() for row in metric_rows(updates)]
    frame = pd.DataFrame(rows, columns=list(FRAME_COLUMNS), dtype=object).dropna()
    trained = frame["split"] == "train"
    frame = frame[~(trained & (frame["policy"].eq(MEAN) | frame["metric"].eq(TOKEN_KL)))]
    of = frame["split"].replace({"train": "training", "validation": "held_out"})
    of = of.mask(frame["role"] == LAST, "last_response")
    policy = frame["policy"].mask(trained & frame["policy"].eq(""), frame["role"])
    table = frame.assign(of=of, policy=policy).rename(columns={"metric": "measure"})
    return table.to_csv(columns=["run", "update", "of", "policy", "measure", "value"], index=False, lineterminator="\n")


class Metrics:
    """The long frame of several runs, and its pivots."""

    def __init__(self, rows: Sequence[tuple[str, int, *FrameRow]]) -> None:
        """Makes the frame of rows of `COLUMNS`."""
        self.frame = pd.DataFrame(rows, columns=list(FRAME_COLUMNS)).astype({"update": int, "value": float})
        self.seeds: pd.Series[int] = self.frame.groupby("run")["seed"].first()
        """By run."""

    @cached_property
    def tables(self) -> dict[str, pd.DataFrame]:
        """By split: a row per run and update that was measured, a column per policy, role and metric."""
        return {
            str(split): part.pivot(index=["run", "update"], columns=["policy", "role", "metric"], values="value")
            for split, part in self.frame.groupby("split")
        }

    def get(self, split: str, metric: str, policy: str = MEAN, role: str = "") -> pd.Series[float]:
        """Returns a metric by run and update, of all updates of the split; NaN where it is not known."""
        if split not in self.tables:
            return self.frame[:0].set_index(["run", "update"])["value"]
        table = self.tables[split]
        column = policy, role, metric
        return table[column] if column in table.columns else pd.Series(math.nan, table.index)


def mean_over_seeds(values: pd.Series[float]) -> pd.DataFrame:
    """Averages a metric over runs.

    Returns:
        By update the `mean` of the runs that have a value, and `low` and `high`, the ends of its interval, which are
        NaN for fewer than `FEWEST` runs.
    """
    table = values.unstack("run")
    means = pd.DataFrame(column_cis(table.to_numpy().T), index=table.index, columns=list(Estimate._fields), dtype=float)
    means.loc[means["n"] < MIN_SEEDS, ["low", "high"]] = math.nan
    return means
