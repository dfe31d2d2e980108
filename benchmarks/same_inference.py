"""`python -m benchmarks.same_inference STUDY --single ppo --chain shared-team`: equal tokens when a query is asked.

A chain of two writes two responses to a query. What could a single agent have done with these tokens, or with more?
After the last update of each run in STUDY, on the task's test queries, of the single agent, of the chain's LLM, and of
the untrained model, each alone and in a chain with itself (as the single agent was never trained to answer):

- the task reward of its answer, of a chain the last one, and the response tokens that it took;
- that of the commonest among `--votes` answers to a query, which takes as many times the tokens.

Each run is evaluated by `cory evaluate`, which resumes after a kill. Prints JSON: means over seeds, and what the
chain's last answer has over each of the others, paired by seed, with 95 % intervals (Student's t).
"""

import argparse
import json
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from launch.display.statistics import estimate_difference

LABELS = {
    "base": "untrained, bare",
    "base after base": "untrained, in a chain with itself",
    "llm_1": "bare",
    "llm_1 after llm_1": "in a chain with itself",
}
"""What is said of a lineup of one run, by its policies, the last first."""
Figures = dict[str, float]
"""Means over queries, by who answers and how."""


class Answer(NamedTuple):
    """An answer to a query."""

    text: str
    reward: float
    tokens: int
    """Generated tokens, including those of earlier responses in its chain."""


def main(argv: list[str] | None = None) -> None:
    """Evaluates, and prints JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.same_inference", description=__doc__)
    parser.add_argument("study", type=Path)
    parser.add_argument("--single", required=True, help="an arm of one agent")
    parser.add_argument("--chain", required=True, help="an arm of one LLM, llm_1, in both roles")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: all that have runs of both")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.1])
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--votes", type=int, nargs="+", default=[3, 5], help="answers to a query that vote")
    options = parser.parse_args(argv)
    arms = {"single": options.single, "chain": options.chain}
    runs = {name: _runs(options.study, arm) for name, arm in arms.items()}
    common_seeds = sorted(runs["single"].keys() & runs["chain"].keys())
    seeds = common_seeds if options.seeds is None else options.seeds
    if not seeds or not set(seeds) <= set(common_seeds):
        names = f"{options.single} and {options.chain} in {options.study}"
        parser.error(f"seeds {seeds} require runs of both {names}; both have {common_seeds}")
    for temperature in options.temperatures:
        by_seed = [
            {
                f"{name}, {label}": figure
                for name in arms
                for label, figure in _evaluate(runs[name][seed], temperature, options.queries, options.votes).items()
                if name == "single" or "untrained" not in label  # which is the same model
            }
            for seed in seeds
        ]
        print(json.dumps({"temperature": temperature, "seeds": seeds, **_compared(by_seed)}, indent=1), flush=True)


def _runs(study: Path, arm: str) -> dict[int, Path]:
    """Returns the runs of an arm by seed."""
    numbered = {folder.name.removeprefix("seed_"): folder for folder in (study / "runs" / arm).glob("seed_*")}
    return {int(number): folder for number, folder in numbered.items() if number.isdecimal()}


def _evaluate(run: Path, temperature: float, queries: int, votes: list[int]) -> Figures:
    """Evaluates the last update's policy and the untrained model, in both roles of a chain of two."""
    out = run.with_name(f"{run.name}.at-{temperature:g}-{max(votes)}x{queries}")
    options_given = ["--checkpoint", "latest", "--agents", "2", "--samples", str(max(votes)), "--queries", str(queries)]
    command = [*options_given, "--out", str(out), "--quiet", f"temperature={temperature:g}"]
    evaluate = [sys.executable, "-m", "cory_rllib", "evaluate", str(run), *command]
    if not (out / "evaluation.json").exists():
        subprocess.run(evaluate, check=True, stdout=sys.stderr)
    answers: dict[str, dict[int, list[Answer]]] = defaultdict(lambda: defaultdict(list))
    for lineup, query, answer in _answers(out / "responses.jsonl"):
        answers[LABELS[lineup]][query].append(answer)
    figures: Figures = {}
    for label, by_query in answers.items():
        figures[label] = float(
            np.mean([answer.reward for answers_to_query in by_query.values() for answer in answers_to_query])
        )
        figures[f"{label}, tokens"] = float(
            np.mean([answer.tokens for answers_to_query in by_query.values() for answer in answers_to_query])
        )
        for count in votes:
            figures[f"{label}, vote of {count}"] = float(
                np.mean([_vote(answers_to_query[:count]) for answers_to_query in by_query.values()])
            )
    return figures


def _answers(responses: Path) -> Iterator[tuple[str, int, Answer]]:
    """Yields who answered after whom, the query, and the answer."""
    with responses.open(encoding="utf-8") as lines:
        for line in lines:
            lineup, tokens = "", 0
            for response in json.loads(line)["responses"]:
                lineup = f"{response['policy']}{' after ' * bool(lineup)}{lineup}"
                tokens += len(response["tokens"])
                yield (
                    lineup,
                    response["query"],
                    Answer(response["text"], response["metrics"]["task_reward"], tokens),
                )


def _vote(answers_to_query: list[Answer]) -> float:
    """Returns the task reward of the commonest text, of several the one that came first."""
    [((_, reward), _)] = Counter((answer.text, answer.reward) for answer in answers_to_query).most_common(1)
    return reward


def _compared(by_seed: list[Figures]) -> dict[str, object]:
    """Returns the mean of each, and the difference of the chain's last answer to it."""
    last = f"chain, {LABELS['llm_1 after llm_1']}"
    compared: dict[str, object] = {}
    for label in by_seed[0]:
        compared[label] = {
            "mean": float(np.mean([by_label[label] for by_label in by_seed])),
            "by_seed": [e[label] for e in by_seed],
        }
        more = estimate_difference({seed: figures[last] - figures[label] for seed, figures in enumerate(by_seed)})
        if more is not None and label != last and not label.endswith("tokens"):
            compared[f"{last}, over {label}"] = more.estimate._asdict() | {"p": more.p}
    return compared


if __name__ == "__main__":
    main()
