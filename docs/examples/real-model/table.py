"""The table and the curves of docs/lab/real-model.md: `python table.py RUNS [--base FOLDER]`.

RUNS is a folder of runs named TASK-VARIANT-SEED. With --base, FOLDER/TASK has the untrained model's responses to the
test queries, an evaluation of one of the chain's runs (`cory evaluate ... --samples 1`); without it, the run's held-out
evaluation before training stands in for them.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from launch.display.statistics import mean_ci

TASKS, ARMS = ("words", "reviews"), ("single", "chain")
LABELS = {"words": "two words in a sentence", "reviews": "review: positive or negative"}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rewards_by_query(responses: list[dict[str, Any]]) -> dict[int, float]:
    return {response["query"]: response["metrics"]["task_reward"] for response in responses}


def mean_rewards(orders: list[list[dict[str, Any]]]) -> dict[int, float]:
    """The mean reward per query over policies or orders of the chain."""
    columns = [rewards_by_query(responses) for responses in orders]
    return {query: float(np.mean([column[query] for column in columns])) for query in columns[0]}


def base_rewards(folder: Path | None, task: str) -> dict[str, dict[int, float]]:
    """The untrained model's reward per test query, alone and as the chain's last answer."""
    if folder is None or not (folder / task / "responses.jsonl").exists():
        return {}
    chains = [line["responses"] for line in lines(folder / task / "responses.jsonl")]
    chains = [chain for chain in chains if chain[0]["policy"] == "base"]
    return {
        "bare": rewards_by_query([chain[0] for chain in chains]),
        "last": rewards_by_query([chain[-1] for chain in chains if len(chain) > 1]),
    }


def run_row(run: Path, kind: str, base: dict[int, float] | None) -> dict[str, Any] | None:
    """One row of the table: the bare query (`bare`) or the chain's last answer (`last`)."""
    if not (run / "final.json").exists():
        return None
    final, updates = json.loads((run / "final.json").read_text()), lines(run / "metrics.jsonl")
    key = "policy" if kind == "bare" else "last_response"
    if key not in final:
        return None
    trained = mean_rewards(list(final[key].values()))
    responses = [response["metrics"] for group in final[key].values() for response in group]
    row: dict[str, Any] = {
        "after": mean_ci(trained.values(), "bootstrap"),
        "kl": np.mean([metrics["kl" if kind == "bare" else "bare_kl"] for metrics in responses]),
        "length": np.mean([metrics["response_length"] for metrics in responses]),
        "cut": 1 - np.mean([metrics["eos_rate"] for metrics in responses]),
        "tokens": sum(update.get("tokens", 0) for update in updates),
        "minutes": sum(update["seconds"]["total"] for update in updates if "seconds" in update) / 60,
    }
    if base:
        row["before"] = float(np.mean([base[query] for query in trained]))
        row["gain"] = mean_ci([trained[query] - base[query] for query in trained], "bootstrap")
    else:
        start = updates[0]["evaluation"]["mean"] if kind == "bare" else updates[0]["last_response"]
        row["before"] = start["task_reward"]
        row["gain"] = mean_ci([reward - row["before"] for reward in trained.values()], "bootstrap")
    return row


def table(runs: Path, base_folder: Path | None) -> str:
    header = "| task | variant | seed | before | after | gain | KL | tokens | cut | generated tokens | minutes |"
    text = [header, "|---|---|---|---|---|---|---|---|---|---|---|"]
    for task in TASKS:
        base = base_rewards(base_folder, task)
        for arm, kind in (("single", "bare"), ("chain", "bare"), ("chain", "last")):
            label = {"single": "single agent", "chain": "chain"}[arm] + (", last answer" if kind == "last" else "")
            gains: list[float] = []
            for run in sorted(runs.glob(f"{task}-{arm}-*")):
                if (row := run_row(run, kind, base.get(kind))) is None:
                    continue
                gains.append(row["gain"].mean)
                seed = run.name.rsplit("-", 1)[1]
                text.append(
                    f"| {task} | {label} | {seed} | {row['before']:.2f} | {row['after'].format('{:.2f}')} | "
                    f"{row['gain'].format('{:+.2f}')} | {row['kl']:.1f} | {row['length']:.0f} | {row['cut']:.1%} | "
                    f"{row['tokens']:,} | {row['minutes']:.0f} |"
                )
            if len(gains) > 2:
                mean = mean_ci(gains).format("{:+.2f}")
                text.append(f"| {task} | {label} | all {len(gains)} | | | **{mean}** | | | | | |")
    return "\n".join(text)


def draw(runs: Path, path: Path) -> None:
    """Draws the reward of the training responses: a panel per task; of a chain, its last agent's."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(TASKS), figsize=(8, 2.8), sharey=True)
    for panel, task in zip(panels, TASKS, strict=True):
        for arm, colour in zip(ARMS, ("#0072B2", "#D55E00"), strict=True):
            for run in sorted(runs.glob(f"{task}-{arm}-*")):
                updates = [line for line in lines(run / "metrics.jsonl") if "role" in line]
                role = "pioneer" if arm == "single" else "observer"
                rewards = [line["role"][role]["task_reward"] for line in updates]
                label = {"single": "single agent", "chain": "chain, last answer"}[arm]
                label = label if run.name.endswith("-0") else "_"
                panel.plot([line["update"] for line in updates], rewards, color=colour, label=label, lw=1.3)
        panel.set(title=LABELS[task], xlabel="update")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("task reward")
    panels[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--base", type=Path)
    parser.add_argument("--curves", type=Path)
    arguments = parser.parse_args()
    print(table(arguments.runs, arguments.base))
    if arguments.curves:
        draw(arguments.runs, arguments.curves)


if __name__ == "__main__":
    main()
