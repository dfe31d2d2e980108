"""The metrics of a run as one long data frame, a row per number, from which all tables and plots of runs are made.

update
split    `train`: training responses; `validation`: held-out evaluations during training; `test`: the evaluation after
         training; `run`: metrics of no split, such as tokens and seconds
policy   the policy id (in evaluations each policy answers the bare query alone); `mean`: the mean of the policies;
         empty: not a metric of one policy
role     the role of training responses, whichever policy had it; `last answer`: the chain's last response, held out;
         else empty
metric, value; `kl` of last answers is their `bare_kl`
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from launch.run_folder.records import Update, flatten, mean_over_policies, with_shown_kl

COLUMNS = ("update", "split", "policy", "role", "metric", "value")
MEAN, LAST_RESPONSE = "mean", "last answer"


def metrics_frame(lines: Sequence[Update], final: Mapping[str, Any] | None = None) -> pd.DataFrame:
    """Returns the metrics of one run, with the columns above; unknown values are NaN.

    Args:
        lines: The lines of `metrics.jsonl`.
        final: The evaluation after training: `update`, `policy`, `mean` and `last_response`.
    """
    rows = [row for line in lines for row in _rows(line)]
    if final is not None:
        evaluation = {"evaluation": {**final["policy"], MEAN: final["mean"]}}
        last_response = {"last_response": final.get("last_response", {})}
        test: Any = {"update": final["update"], **evaluation, **last_response}
        rows += [
            (update, "test", policy, role, metric, value) for update, _, policy, role, metric, value in _rows(test)
        ]
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype({"update": int, "value": float})


def _rows(line: Update) -> Iterator[tuple[int, str, str, str, str, float | None]]:
    if policies := line.get("policy"):
        line = {**line, "policy": {**policies, MEAN: mean_over_policies(list(policies.values()))}}
    if "last_response" in line:
        line = {**line, "last_response": with_shown_kl(line["last_response"])}
    for name, value in flatten(line):
        kind, _, rest = name.partition("/")
        member, _, metric = rest.partition("/")
        if kind == "policy":
            columns = ("train", member, "", metric)
        elif kind == "role":
            columns = ("train", "", member, metric)
        elif kind == "evaluation":
            columns = ("validation", member, "", metric)
        elif kind == "last_response":
            columns = ("validation", "", LAST_RESPONSE, rest)
        else:
            columns = ("run", "", "", name)
        if name != "update":
            yield line["update"], *columns, value
