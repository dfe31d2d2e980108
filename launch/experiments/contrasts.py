"""Contrasts of a study: planned comparisons of two arms, written down before the runs, and their results.

contrasts:
  - {arm: one-llm, against: rloo}                   # each policy alone on the bare query
  - {arm: two-llms, of: mean, against: rloo}        # the LLM with the mean of all LLMs' weights
  - {arm: one-llm, of: last, against: rloo}         # the chain's last response; KL from the base on the bare query
  - {arm: one-llm, against: rloo, at: tokens}       # at equal generated tokens
  - {arm: one-llm, against: rloo-fast, allow: [lr]} # another learning rate is intended, so it is not marked
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import BaseModel
from rich.table import Table

from launch.display.statistics import Difference, holm
from launch.display.tables import new_table
from launch.experiments.arm_differences import Confounder, arm_differences, format_differences
from policies.models.model_names import AVERAGE_POLICY

if TYPE_CHECKING:
    from launch.experiments.results import StudyRun

LEVEL_MARGIN = -0.02
"""Two arms are level if the lower end of the confidence interval of their difference is above this."""
CONTRAST_METRIC = "combined_reward"
_FRAME_KEYS = {"bare": ("mean", ""), "last": ("", "last answer"), "mean": (AVERAGE_POLICY, "")}
"""Value of `of` to the policy and role of the metric in the data frame."""


class Contrast(BaseModel, frozen=True, extra="forbid"):
    """A comparison of two arms by the combined reward."""

    arm: str
    against: str
    of: Literal["bare", "last", "mean"] = "bare"
    """Responses of `arm` to evaluate: each policy's on the `bare` query, the chain's `last`, or those of the LLM with
    the `mean` weights."""
    against_of: Literal["bare", "last", "mean"] = "bare"
    at: Literal["end", "tokens"] = "end"
    """`end`: after the last update. `tokens`: at the run's last held-out evaluation before it had generated more tokens
    than the other arm's run with the same seed generated in total."""
    allow: tuple[Confounder, ...] = ()
    """Differences that are intended, so that the results do not mark them."""


class ContrastResult(NamedTuple):
    """The result of a contrast."""

    contrast: Contrast
    difference: Difference
    p: float | None
    """Of the sign-flip test, corrected for all contrasts of the study; None for fewer than two pairs."""
    arm_differences: list[str]

    @property
    def verdict(self) -> str:
        """The result in a word or two: `above`, `below`, `level`, `open` or `one seed`."""
        low, high = self.difference.estimate.low, self.difference.estimate.high
        if low is None or high is None:
            return "one seed"
        if low > 0 or high < 0:
            return "above" if low > 0 else "below"
        return "level" if low > LEVEL_MARGIN else "open"


def evaluate_contrasts(contrasts: Sequence[Contrast], runs: "Sequence[StudyRun]") -> list[ContrastResult]:
    """Returns the results of those contrasts whose arms share a seed."""
    import pandas as pd

    from launch.experiments.measures import (
        did_all_updates,
        final_value,
        metrics_of,
        paired_difference,
        total_tokens,
        value_at_tokens,
    )

    differences = []
    for contrast in contrasts:
        arm_runs = [[run for run in runs if run.arm == arm] for arm in (contrast.arm, contrast.against)]
        frame_keys = [_FRAME_KEYS[contrast.of], _FRAME_KEYS[contrast.against_of]]
        if contrast.at == "tokens":
            frames = [metrics_of(run for run in group if did_all_updates(run)) for group in arm_runs]
            totals = [metrics.by_seed(total_tokens) for metrics in frames]
            token_limits = pd.concat(totals).groupby(level=0).min().to_dict()
            measures = [value_at_tokens(CONTRAST_METRIC, *keys, token_limits) for keys in frame_keys]
        else:
            frames = [metrics_of(group) for group in arm_runs]
            measures = [final_value(CONTRAST_METRIC, *keys) for keys in frame_keys]
        difference = paired_difference(
            *(metrics.by_seed(measure) for metrics, measure in zip(frames, measures, strict=True))
        )
        if difference is not None:
            arm, against = (group[0].settings for group in arm_runs)
            differences.append((contrast, difference, arm_differences(arm, against, contrast.allow)))
    corrected = holm([difference.p for _, difference, _ in differences], len(contrasts))
    return [
        ContrastResult(contrast, difference, p, settings)
        for (contrast, difference, settings), p in zip(differences, corrected, strict=True)
    ]


def contrasts_table(results: Sequence[ContrastResult]) -> Table:
    """Returns a table of contrasts: differences with their 95 % intervals, and the corrected p."""
    rows = [
        [
            _arm_label(result.contrast.arm, result.contrast.of) + ", equal tokens" * (result.contrast.at == "tokens"),
            _arm_label(result.contrast.against, result.contrast.against_of),
            str(len(result.difference.seeds)),
            result.difference.estimate.format("{:+.3f}"),
            "" if result.p is None else f"{result.p:.2g}",
            result.verdict,
        ]
        for result in results
    ]
    return new_table(["arm", "against"], ["seeds", "difference", "p", ""], rows)


def differences_text(results: Sequence[ContrastResult]) -> str:
    """Returns the settings in which the arms of contrasts differ, as text to print under their table."""
    return format_differences(
        (f"{result.contrast.arm} vs. {result.contrast.against}", result.arm_differences) for result in results
    )


def _arm_label(arm: str, source: str) -> str:
    return {"bare": arm, "last": f"{arm}, last answer", "mean": f"{arm}, mean LLM"}[source]
