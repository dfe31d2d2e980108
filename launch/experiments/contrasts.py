"""The questions of a study, written down before its runs: which arm against which, in what, and what came out.

contrasts:
  - {arm: one-llm, against: rloo}                   # each policy on the bare query
  - {arm: two-llms, of: mean, against: rloo}        # the LLM whose weights are the mean of the others'
  - {arm: one-llm, of: last, against: rloo}         # the chain's last answer; its KL is to the base on the bare query
  - {arm: one-llm, against: rloo, at: tokens}       # when each had generated as many tokens as the other at most
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import BaseModel
from rich.table import Table

from launch.display.statistics import Difference, holm
from launch.display.tables import table
from policies.models.model_names import AVERAGE

if TYPE_CHECKING:
    from launch.experiments.results import StudyRun

LEVEL_MARGIN = -0.02
"""An arm is level with another one where the lower end of the interval of their difference is above this."""
CONTRAST_METRIC = "combined_reward"
_FRAME_KEYS = {"bare": ("mean", ""), "last": ("", "last answer"), "mean": (AVERAGE, "")}
"""What an arm is compared by: the policy and role of its figure in the data frame."""


class Contrast(BaseModel, frozen=True, extra="forbid"):
    """An arm against another one, by the combined reward."""

    arm: str
    against: str
    of: Literal["bare", "last", "mean"] = "bare"
    """What of the arm: the policies' `bare` answers, the chain's `last`, or those of the `mean` of its LLMs."""
    against_of: Literal["bare", "last", "mean"] = "bare"
    at: Literal["end", "tokens"] = "end"
    """`end`: after the last update. `tokens`: at each run's last held-out evaluation in training before it had
    generated more tokens than the run of the other arm with the same seed did in all."""


class ContrastResult(NamedTuple):
    """What came out of a contrast."""

    contrast: Contrast
    difference: Difference
    p: float | None
    """Of the sign-flip test, corrected for all contrasts of the study (Holm 1979); None for fewer than two pairs."""

    @property
    def verdict(self) -> str:
        """In a word or two."""
        low, high = self.difference.estimate.low, self.difference.estimate.high
        if low is None or high is None:
            return "one seed"
        if low > 0 or high < 0:
            return "above" if low > 0 else "below"
        return "level" if low > LEVEL_MARGIN else "open"


def evaluate_contrasts(contrasts: Sequence[Contrast], runs: "Sequence[StudyRun]") -> list[ContrastResult]:
    """Returns what runs say of those contrasts whose arms have a seed in common; p is corrected for all contrasts."""
    import pandas as pd

    from launch.experiments.measures import at_end, did_all_updates, total_tokens, metrics_of, paired, value_at_tokens

    found = []
    for contrast in contrasts:
        sides = [[run for run in runs if run.arm == arm] for arm in (contrast.arm, contrast.against)]
        figures = [_FRAME_KEYS[contrast.of], _FRAME_KEYS[contrast.against_of]]
        if contrast.at == "tokens":
            one, other = (metrics_of(run for run in side if did_all_updates(run)) for side in sides)
            totals = [metrics.by_seed(total_tokens) for metrics in (one, other)]
            fewer = pd.concat(totals).groupby(level=0).min().to_dict()
            measures = [value_at_tokens(CONTRAST_METRIC, *figure, fewer) for figure in figures]
        else:
            one, other = map(metrics_of, sides)
            measures = [at_end(CONTRAST_METRIC, *figure) for figure in figures]
        difference = paired(*(side.by_seed(measure) for side, measure in zip((one, other), measures, strict=True)))
        if difference is not None:
            found.append((contrast, difference))
    corrected = holm([difference.p for _, difference in found], len(contrasts))
    return [ContrastResult(*pair, p) for pair, p in zip(found, corrected, strict=True)]


def contrasts_table(found: Sequence[ContrastResult]) -> Table:
    """Returns what came of a study's contrasts: differences with their 95 % intervals, and p corrected for them all."""
    made = table(["arm", "against"], ["seeds", "difference", "p", ""])
    for answer in found:
        contrast, difference, p = answer
        made.add_row(
            _side(contrast.arm, contrast.of) + ", equal tokens" * (contrast.at == "tokens"),
            _side(contrast.against, contrast.against_of),
            str(len(difference.seeds)),
            difference.estimate.shown("{:+.3f}"),
            "" if p is None else f"{p:.2g}",
            answer.verdict,
        )
    return made


def _side(arm: str, of: str) -> str:
    return {"bare": arm, "last": f"{arm}, last answer", "mean": f"{arm}, mean LLM"}[of]
