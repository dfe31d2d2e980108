"""`python -m benchmarks.steps STUDY ARM ...`: how much of an LLM's weight change is specific to its run (noise).

Of each arm's runs in STUDY (`cory study … --out STUDY` keeps them in its folder `runs`), one per seed, the step from
the base to the weights after the last update: of the only LLM, or of the mean of a run's. Over the R runs of an arm,

- common: |mean step|², less the contribution of noise, noise / R: common to all seeds;
- noise: the mean of |step − mean step|², by R − 1: specific to one run, its queries and samples;
- apart: with several LLMs, the mean of |step of one − step of their mean|²: removed by averaging, or not yet.

Prints JSON. The squares are sums over all weights.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

from launch.models.trained import PolicySet, open_trained
from policies.models.language_model import load_language_model

Vector = npt.NDArray[np.float64]


def main(argv: list[str] | None = None) -> None:
    """Reads the runs, and prints JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps", description=__doc__)
    parser.add_argument("study", type=Path)
    parser.add_argument("arms", nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", required=True, help="two or more, whose runs are done")
    options = parser.parse_args(argv)
    results = {}
    for arm in options.arms:
        runs = [options.study / "runs" / arm / f"seed_{seed}" for seed in options.seeds]
        results[arm] = accounts([steps(open_trained(run, "latest")) for run in runs])
    print(json.dumps(results, indent=1))


def steps(trained: PolicySet) -> list[Vector]:
    """Returns the step from the base to each LLM of a run, all weights in one row."""
    base = load_language_model(trained.settings.model_paths[trained.settings.policy_ids[0]]).named_parameters()
    start = {name: parameter.detach().double().numpy() for name, parameter in base}
    return [
        np.concatenate([(weights[name] - start[name]).ravel() for name in start])
        for weights in map(trained.weights, trained.settings.policy_ids)
    ]


def accounts(runs: list[list[Vector]]) -> dict[str, float]:
    """Splits the squared steps of two runs or more, of full weights, into the parts in the module's docstring."""
    means = np.stack([np.mean(run, axis=0) for run in runs])
    center = means.mean(axis=0)
    noise = float(np.square(means - center).sum() / (len(runs) - 1))
    parts = {"common": float(np.square(center).sum()) - noise / len(runs), "noise": noise}
    if len(runs[0]) > 1:
        distances = [np.square(step - mean).sum() for run, mean in zip(runs, means, strict=True) for step in run]
        parts["apart"] = float(np.mean(distances))
    return parts


if __name__ == "__main__":
    main()
