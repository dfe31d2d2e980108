"""`python -m benchmarks.reproduction STUDY ... --out FILE`: judges what is claimed of CORY by studies' results."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from benchmarks.reproduction.claims import Judged, judge_all
from launch.experiments.results import StudyRun, read
from launch.run_folder.journal import atomic_write


class JudgedClaim(TypedDict):
    """What is claimed of a method, and what a study found."""

    text: str
    source: str
    rule: str
    """By which it is judged."""
    found: str
    """The figure, or nothing."""
    small: str
    """What belongs to it: p and effect size."""
    verdict: str


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the claims that these studies are asked about, those that were run first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reproduction", description=__doc__)
    parser.add_argument("studies", nargs="+", type=Path, metavar="STUDY", help="the folder of a study's results")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where to")
    options = parser.parse_args(argv)
    judged = claims([run for study in options.studies for run in read(study)])
    atomic_write(options.out, json.dumps(judged, indent=1, ensure_ascii=False) + "\n")
    print(options.out)


def claims(runs: Sequence[StudyRun]) -> list[JudgedClaim]:
    """Returns every claim that a study among the runs is asked about, with our figure; those that were run first."""
    studies = {run.study for run in runs}
    asked = [judged for judged in judge_all(runs) if judged.claim.study in studies]
    return [_shown(judged) for judged in sorted(asked, key=lambda judged: judged.found.verdict == "not run")]


def _shown(judged: Judged) -> JudgedClaim:
    claim, found = judged
    here = f"here by study {claim.study}. Reproduced where " if claim.judge else ""
    small = [f"p {found.p:.2g}"] if found.p is not None else []
    small += [f"g {found.effect:+z.1f}"] if found.effect is not None else []
    return JudgedClaim(
        text=claim.text,
        source=claim.source,
        rule=f"{here}{claim.rule}.",
        found=found.text,
        small=" ".join(small),
        verdict=found.verdict,
    )


if __name__ == "__main__":
    main()
