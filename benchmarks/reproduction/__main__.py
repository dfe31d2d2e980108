"""`python -m benchmarks.reproduction STUDY ... --out FILE`: judges the claims about CORY by the results of studies."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from benchmarks.reproduction.claims import Judged, judge_all
from launch.experiments.results import StudyRun, read_results
from policies.files import atomic_write


class JudgedClaim(TypedDict):
    """A claim about a method, and the result of a study."""

    text: str
    source: str
    rule: str
    """The rule by which it is judged."""
    finding: str
    """The figure; empty if not run."""
    small: str
    """Details in small print: p and effect size."""
    verdict: str


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the claims that these studies test; claims without runs come last."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reproduction", description=__doc__)
    parser.add_argument("studies", nargs="+", type=Path, metavar="STUDY", help="the folder of a study's results")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to write")
    options = parser.parse_args(argv)
    judged = claims([run for study in options.studies for run in read_results(study)])
    atomic_write(options.out, json.dumps(judged, indent=1, ensure_ascii=False) + "\n")
    print(options.out)


def claims(runs: Sequence[StudyRun]) -> list[JudgedClaim]:
    """Returns the claims that the studies of these runs test, with our figures; claims without runs come last."""
    studies = {run.study for run in runs}
    selected = [judged for judged in judge_all(runs) if judged.claim.study in studies]
    return [_shown(judged) for judged in sorted(selected, key=lambda judged: judged.finding.verdict == "not run")]


def _shown(judged: Judged) -> JudgedClaim:
    claim, finding = judged
    here = f"here by study {claim.study}. Reproduced where " if claim.judge else ""
    small = [f"p {finding.p:.2g}"] if finding.p is not None else []
    small += [f"g {finding.effect:+z.1f}"] if finding.effect is not None else []
    return JudgedClaim(
        text=claim.text,
        source=claim.source,
        rule=f"{here}{claim.rule}.",
        finding=finding.text,
        small=" ".join(small),
        verdict=finding.verdict,
    )


if __name__ == "__main__":
    main()
