"""The questions of a study, written down before its runs: which arm against which, in what, and what came out.

contrasts:
  - {arm: one-llm, against: rloo}                   # each policy on the bare query
  - {arm: two-llms, of: mean, against: rloo}        # the LLM whose weights are the mean of the others'
  - {arm: one-llm, of: last, against: rloo}         # the chain's last answer; its KL is to the base on the bare query
  - {arm: one-llm, against: rloo, at: tokens}       # when each had generated as many tokens as the other at most
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from launch.console.errors import CommandError
from launch.experiments.measures import Difference, at_end, generated, last_answer, of_average, paired, whole, within
from launch.experiments.results import StudyRun

LEVEL = -0.02
"""An arm is level with another one where the lower end of the interval of their difference is above this."""
FIGURE = "combined_reward"
_OF = {"bare": at_end, "last": last_answer, "mean": of_average}
_KEYS = ("arm", "of", "against", "against_of", "at")
_AT = ("end", "tokens")


class Contrast(NamedTuple):
    """An arm against another one, by the combined reward."""

    arm: str
    of: str
    """What of the arm: the policies' `bare` answers, the chain's `last`, or those of the `mean` of its LLMs."""
    against: str
    against_of: str
    at: str = "end"
    """`end`: after the last update. `tokens`: at each run's last held-out evaluation in training before it had
    generated more tokens than the run of the other arm with the same seed did in all."""


class Answer(NamedTuple):
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
        return "level" if low > LEVEL else "open"


def read_contrasts(entries: object, arms: Sequence[str], where: str) -> tuple[Contrast, ...]:
    """Reads the contrasts of a study's file.

    Raises:
        CommandError: one is not as the module's docstring says.
    """
    if not isinstance(entries, list):
        raise CommandError(f"contrasts in {where} must be a list.")
    return tuple(_contrast(entry, arms, where) for entry in entries)


def _contrast(entry: object, arms: Sequence[str], where: str) -> Contrast:
    if not isinstance(entry, Mapping) or not {"arm", "against"} <= entry.keys() or not entry.keys() <= set(_KEYS):
        raise CommandError(
            f"A contrast in {where} says `arm` and `against`, maybe `of`, `against_of` and `at`: {entry}."
        )
    found: dict[str, Any] = {"of": "bare", "against_of": "bare", **entry}
    for key in ("arm", "against"):
        if found[key] not in arms:
            raise CommandError(f"A contrast in {where} names {found[key]}, which is no arm of it: {', '.join(arms)}.")
    for key in ("of", "against_of"):
        if found[key] not in _OF:
            raise CommandError(f"A contrast in {where} has {key}: {found[key]}, which is none of {', '.join(_OF)}.")
    if found.get("at", "end") not in _AT:
        raise CommandError(f"A contrast in {where} has at: {found['at']}, which is none of {', '.join(_AT)}.")
    return Contrast(**found)


def answers(contrasts: Sequence[Contrast], runs: Sequence[StudyRun]) -> list[Answer]:
    """Returns what runs say of those contrasts whose arms have a seed in common; p is corrected for all contrasts."""
    found = []
    for contrast in contrasts:
        one, other = ([run for run in runs if run.arm == arm] for arm in (contrast.arm, contrast.against))
        measures = [_OF[contrast.of](FIGURE), _OF[contrast.against_of](FIGURE)]
        if contrast.at == "tokens":
            fewer: dict[int, int] = {}
            one, other = ([run for run in side if whole(run)] for side in (one, other))
            for run in (*one, *other):
                fewer[run.seed] = min(generated(run), fewer.get(run.seed, sys.maxsize))
            measures = [within(FIGURE, of, fewer) for of in (contrast.of, contrast.against_of)]
        difference = paired(one, other, *measures)
        if difference is not None:
            found.append((contrast, difference))
    corrected = holm([difference.p for _, difference in found], len(contrasts))
    return [Answer(*each, p) for each, p in zip(found, corrected, strict=True)]


def holm(ps: Sequence[float | None], count: int) -> list[float | None]:
    """Corrects the p of several tests for their number, by Holm's step-down method.

    Args:
        ps: of the tests that were made; None where one has no p.
        count: of all tests that are asked for, made or not.
    """
    known = sorted((p, place) for place, p in enumerate(ps) if p is not None)
    corrected: list[float | None] = [None] * len(ps)
    least = 0.0
    for rank, (p, place) in enumerate(known):
        least = max(least, min(p * (count - rank), 1.0))
        corrected[place] = least
    return corrected
