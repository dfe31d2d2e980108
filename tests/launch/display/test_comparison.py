"""Comparing recorded runs: `cory plot RUN RUN`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from launch.display.comparison import ALONE, ComparedRun, draw_comparison, group_runs
from launch.display.statistics import mean_ci
from launch.main import main
from launch.run_folder import final
from launch.run_folder.final import FinalEvaluation
from launch.run_folder.records import EvaluatedResponse
from launch.run_folder.run import Run
from policies.learning.metrics import RESPONSE_METRICS
from tests.launch.conftest import record_test_run
from tests.paper import paper_settings

REWARDS = {"llm_1": [0.0, 1.0, 2.0, 5.0], "llm_2": [1.0, 1.0, 4.0, 3.0]}
QUERIES = [3, 4, 5, 6]


def responses(rewards: list[float], queries: list[int]) -> list[EvaluatedResponse]:
    return [
        EvaluatedResponse(
            policy="",
            role="",
            query=query,
            sample=0,
            prompt="",
            text="",
            tokens=[],
            metrics=dict.fromkeys(RESPONSE_METRICS, reward),
        )
        for query, reward in zip(queries, rewards, strict=True)
    ]


def record(folder: Path, rewards: dict[str, list[float]] | None = None, **settings: Any) -> Run:
    """Records a run of 12 updates with test rewards of `QUERIES`: by policy, and `last` of the chain."""
    run = record_test_run(folder, paper_settings(num_updates=12, **settings))
    if rewards is not None:
        policy = {name: responses(values, QUERIES) for name, values in rewards.items() if name != "last"}
        result = FinalEvaluation(update=12, policy=policy)
        if "last" in rewards:
            result["last_response"] = {"llm_1,llm_2": responses(rewards["last"], QUERIES)}
        final.write_final(run.final, result)
    run.unlock()
    return run


def plot(capsys: pytest.CaptureFixture[str], *words: str | Path) -> list[str]:
    """Returns the lines of `cory plot`, with single spaces."""
    assert main(["plot", *map(str, words)]) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_two_runs_are_compared_query_by_query(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = [2.0, 4.0, 6.0, 1.0]
    chain = record(tmp_path / "chain", {**REWARDS, "last": last})
    single = record(tmp_path / "single", {"llm_1": [1.0, 1.0, 1.0, 0.0]}, num_agents=1, lr=3e-5)
    lines = plot(capsys, single.path, chain.path, "--out", tmp_path / "both.png")
    assert imread(tmp_path / "both.png").shape[1] > 1500 and lines[-1] == str(tmp_path / "both.png")
    assert "setting single chain" in lines and "num_agents 1 2" in lines and "lr 3e-05 1.41e-05" in lines
    assert not [line for line in lines if line.startswith(("num_updates", "seed"))]
    alone = np.mean(list(REWARDS.values()), axis=0)

    def text(values: Any) -> str:
        return mean_ci(values, "bootstrap").format("{:+.2f}")

    assert any(line.startswith(f"single each alone 12 36,000 4 queries {text([1, 1, 1, 0])}") for line in lines)
    assert any(line.startswith(f"chain each alone 12 36,000 4 queries {text(alone)}") for line in lines)
    assert any(line.startswith(f"last answer 4 queries {text(last)}") for line in lines)
    difference = lines.index(next(line for line in lines if line.startswith("difference from single")))
    assert lines[difference + 2].startswith(f"chain each alone 4 queries {text(alone - [1, 1, 1, 0])}")
    # The last answer of a single agent is its only one.
    assert lines[difference + 3].startswith(f"chain last answer 4 queries {text(np.array(last) - [1, 1, 1, 0])}")


def test_runs_that_differ_only_in_the_seed_are_compared_over_their_common_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = {0: 1.0, 1: 2.0, 2: 4.0}
    names = [
        record(tmp_path / f"{arm}-{seed}", dict.fromkeys(REWARDS, [end + bonus] * 4), seed=seed, lr=lr).path
        for arm, lr, bonus in (("a", 1e-5, 0.0), ("b", 2e-5, 1.0))
        for seed, end in ends.items()
        if (arm, seed) != ("a", 2)
    ]
    lines = plot(capsys, *names, "--out", tmp_path / "seeds.png")
    assert any(line.startswith("a-0 and 1 more seed each alone 12 36,000 2 seeds +1.50 [") for line in lines)
    assert any(
        line.startswith(f"b-0 and 2 more seeds each alone 12 36,000 3 seeds {mean_ci([2, 3, 5]).format('{:+.2f}')}")
        for line in lines
    )
    assert any(line.startswith("b-0 and 2 more seeds each alone 2 seeds +1.00 [+1.00, +1.00]") for line in lines)
    assert any(line.startswith("setting a-0") for line in lines) and not any(line.startswith("seed ") for line in lines)


def test_repetitions_of_a_seed_are_groups_of_their_own(tmp_path: Path) -> None:
    runs = [ComparedRun(record(tmp_path / name, seed=seed), name) for name, seed in zip("abc", (0, 0, 1), strict=True)]
    groups = group_runs(runs)
    assert [[run.name for run in group.runs] for group in groups] == [["a", "c"], ["b"]]
    (legend,) = draw_comparison(groups).legends
    assert [text.get_text() for text in legend.get_texts()][:2] == ["a and 1 more seed", "b"]


def test_runs_without_test_responses_are_compared_by_their_last_evaluation_without_intervals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = record(tmp_path / "a", REWARDS), record(tmp_path / "b", lr=3e-5)
    with a.metrics_file.path.open("a") as file:
        file.write('{"update": 13}\n')  # the run continued after its test responses
    assert not ComparedRun(a, "a").is_tested
    lines = plot(capsys, a.path, b.path, "--out", tmp_path / "both.png")
    rows = [line for line in lines if ALONE in line]
    assert rows[0].startswith("a each alone 12 ")
    assert len(rows) == 3 and "[" not in "".join(rows) and "quer" not in "".join(rows)


def test_combined_rewards_with_other_kl_weights_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [record(tmp_path / name, REWARDS, kl_coef=kl).path for name, kl in (("a", 0.3), ("b", 0.1))]
    lines = plot(capsys, *paths, "--out", tmp_path / "both.png")
    assert "b each alone 4 queries +0.00 [+0.00, +0.00] 0.00 [0.00, 0.00] other KL weight" in lines


def test_runs_with_other_queries_or_rewards_have_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [record(tmp_path / "a", REWARDS).path, record(tmp_path / "b", REWARDS, eval_queries=7).path]
    lines = plot(capsys, *paths, "--out", tmp_path / "both.png")
    assert "b other held-out queries or rewards - - -" in lines
