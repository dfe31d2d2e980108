"""`python -m benchmarks.same_inference STUDY --single ppo --chain shared-team`: equal tokens when a query is asked.

A chain of two writes two responses to a query. What could a single agent have done with two? After the last update of
each run in STUDY, on the task's test queries:

- its policy in a chain with itself: it answers again, seeing its first answer, as it was never trained to;
- its bare answers at a low temperature, as a vote among many responses, or the likeliest of them, would choose.

Each run is evaluated by `cory evaluate`, which goes on where it was killed. Prints means over seeds, and what the
chain's last answer has over each at the same temperature, paired by seed, with 95 % intervals (Student's t).
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from launch.study.measures import differences

BARE, CHAIN, LAST = "one agent, bare", "one agent, in a chain with itself", "the chain's last answer"
Shares = dict[str, dict[int, float]]
"""Task reward of the test queries by who answers, and by seed."""


def main(argv: list[str] | None = None) -> None:
    """Evaluates, and prints JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.same_inference", description=__doc__)
    parser.add_argument("study", type=Path)
    parser.add_argument("--single", required=True, help="an arm of one agent")
    parser.add_argument("--chain", required=True, help="an arm of one LLM in both roles")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: all that have runs of both")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.1])
    parser.add_argument("--queries", type=int, default=1000)
    options = parser.parse_args(argv)
    runs = {arm: _runs(options.study, arm) for arm in (options.single, options.chain)}
    both = sorted(runs[options.single].keys() & runs[options.chain].keys())
    seeds = both if options.seeds is None else options.seeds
    if not seeds or not set(seeds) <= set(both):
        parser.error(f"runs of both {options.single} and {options.chain} in {options.study} are of the seeds {both}")
    for temperature in options.temperatures:
        found: Shares = {BARE: {}, CHAIN: {}, LAST: {}}
        for seed in seeds:
            alone = _evaluate(runs[options.single][seed], temperature, options.queries)
            found[BARE][seed], found[CHAIN][seed] = alone["llm_1"], alone["llm_1 after llm_1"]
            found[LAST][seed] = _evaluate(runs[options.chain][seed], temperature, options.queries)["llm_1 after llm_1"]
        print(json.dumps({"temperature": temperature, "seeds": seeds, **_compared(found)}, indent=1), flush=True)


def _runs(study: Path, arm: str) -> dict[int, Path]:
    """Returns the runs of an arm by seed."""
    folders = (study / "runs" / arm).glob("seed_*")
    return {int(folder.name.removeprefix("seed_")): folder for folder in folders if folder.name[5:].isdecimal()}


def _evaluate(run: Path, temperature: float, queries: int) -> dict[str, float]:
    """Returns the task reward of the last update's policy, in both roles of a chain of two, by who answers."""
    out = run.with_name(f"{run.name}.at-{temperature:g}")
    asked = ["--checkpoint", "latest", "--agents", "2", "--samples", "1", "--queries", str(queries)]
    command = [*asked, "--out", str(out), "--quiet", f"temperature={temperature:g}"]
    subprocess.run([sys.executable, "-m", "launch.main", "evaluate", str(run), *command], check=True)
    rows = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))["rows"]
    return {label: row["figures"]["task_reward"]["mean"] for label, row in rows.items()}


def _compared(found: Shares) -> dict[str, object]:
    """Returns each answerer's mean, and what the chain's last answer has over it."""
    compared: dict[str, object] = {}
    for who, by_seed in found.items():
        compared[who] = {"mean": float(np.mean(list(by_seed.values()))), "by_seed": list(by_seed.values())}
        if who != LAST:
            more = differences({seed: found[LAST][seed] - value for seed, value in by_seed.items()})
            if more is not None:
                compared[f"{LAST} over {who}"] = more.estimate._asdict() | {"p": more.p}
    return compared


if __name__ == "__main__":
    main()
