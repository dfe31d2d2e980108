"""The demo: its table, example and curves, and (slow) the whole of it with two updates per arm."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from rich.console import Console

from launch.experiments.study import load_study
from launch.run_folder.records import Update
from recipes.demo import (
    CHAIN,
    SINGLE,
    UNTRAINED,
    Probe,
    curve,
    demo_plot,
    demo_table,
    example,
    main,
    run_demo,
)

LINES: list[Update] = [
    {"update": 0, "evaluation": {"mean": {"task_reward": 0.25}}, "last_response": {"task_reward": 0.5}},
    {"update": 1, "tokens": 1000},
    {"update": 2, "tokens": 3000, "evaluation": {"mean": {"task_reward": 0.0}}, "last_response": {"task_reward": 1.0}},
]


def probe(share: float, *answers: tuple[str, float, str, float]) -> Probe:
    """Returns a probe with shares that grow by 0.01 per figure, and a sample per query."""
    figures: dict[str, dict[str, Any]] = {
        name: {"mean": share + index / 100, "low": share - 0.02, "high": share + 0.05, "tokens": 4.25 * (index + 1)}
        for index, name in enumerate(("one_answer", "vote_of_3", "chain"))
    }
    samples = {
        query: {
            "first": {"text": first, "task_reward": reward},
            "second": {"text": second, "task_reward": second_reward},
        }
        for query, (first, reward, second, second_reward) in enumerate(answers)
    }
    return Probe(figures, samples)


def test_every_row_compares_the_untrained_model_with_the_llm_that_answers_in_the_same_way() -> None:
    probes = {UNTRAINED: probe(0.2), SINGLE: probe(0.6), CHAIN: probe(0.9)}
    console = Console(width=200)
    with console.capture() as capture:
        console.print(demo_table(probes, {SINGLE: 60_001, CHAIN: 60_000}))
    rows = [" ".join(line.split()) for line in capture.get().splitlines()[2:]]
    assert rows == [
        "single agent 20% [18, 25] 60% [58, 65] 4.2 60,001",
        "vote of 3 of its answers 21% [18, 25] 61% [58, 65] 8.5",
        "its LLM, used as a chain 22% [18, 25] 62% [58, 65] 12.8",
        "chain, last answer 22% [18, 25] 92% [88, 95] 12.8 60,000",
    ]


def test_the_example_is_a_query_that_only_the_trained_chain_answers_right() -> None:
    right, wrong = ("144", 1.0, "144", 1.0), ("109+035", 0.0, "141", 0.0)
    probes = {
        UNTRAINED: probe(0.2, right, wrong, right),
        SINGLE: probe(0.6, wrong, ("143", 0.0, "1", 0.0), right),
        CHAIN: probe(0.9, wrong, ("109+035", 0.0, "144", 1.0), right),
    }
    assert example(["1+1+1", "48+61+35", "2+2+2"], probes).splitlines() == [
        "An example in which they differ, 48+61+35:",
        "  single agent, trained   143 (wrong)",
        "  chain, untrained        pioneer 109+035 (a step), observer 141 (wrong)",
        "  chain, trained          pioneer 109+035 (a step), observer 144 (right)",
    ]
    without_contrast = {name: probe(0.5, wrong, right) for name in probes}
    assert example(["1+1+1", "2+2+2"], without_contrast).startswith("For example 2+2+2:")
    all_wrong = {name: probe(0.0, wrong) for name in probes}
    assert "observer 141 (wrong)" in example(["1+1+1"], all_wrong)


def test_curves_are_scores_over_generated_tokens_of_the_last_answer_or_of_the_single_agent() -> None:
    assert curve(CHAIN, LINES) == [(0, 0.5), (4000, 1.0)]
    assert curve(SINGLE, LINES) == [(0, 0.25), (4000, 0.0)]
    (axes,) = demo_plot({CHAIN: LINES, SINGLE: LINES}).axes
    assert [str(line.get_label()) for line in axes.lines] == ["chain, last answer", "single agent"]
    assert [[*map(float, line.get_xdata())] for line in axes.lines] == [[0, 4], [0, 4]]  # type: ignore[arg-type]
    assert [[*map(float, line.get_ydata())] for line in axes.lines] == [[0.5, 1.0], [0.25, 0.0]]  # type: ignore[arg-type]


def test_the_arms_of_the_demo_have_the_same_model_task_and_evaluation() -> None:
    study = load_study("demo")
    single, chain = (study.settings(study.arms[name], 0) for name in (SINGLE, CHAIN))
    for name in ("model", "task", "dtype", "eval_every", "eval_queries", "report_kl_coef", "seed"):
        assert getattr(single, name) == getattr(chain, name), name
    assert single.num_agents == 1 and chain.num_agents == 2 and chain.reward_scope == "last"
    assert single.queries_per_update == chain.queries_per_update * chain.num_agents  # as many responses per update


def test_a_folder_that_cannot_be_created_is_a_user_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["--out", str(tmp_path / "file" / "demo")]) == 2
    assert "file/demo cannot be created: Not a directory." in capsys.readouterr().err


@pytest.mark.slow
def test_the_demo_prints_a_table_and_an_example_and_draws_the_curves(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.demo.NUM_QUERIES", 20)
    study = load_study("demo", ["num_updates=2", "warmup_updates=1", "eval_queries=20"])
    study.arms[SINGLE].differs["num_updates"] = 2
    run_demo(study, tmp_path / "demo")
    output = capfd.readouterr().out
    assert (
        "was pre-trained to" in output
        and "chain, last answer" in output
        and "An example in which they differ, " in output
    )
    assert output.count("%") > 8 and imread(tmp_path / "demo" / "curves.png")[..., :3].std() > 0.05
    probes = tmp_path / "demo" / "probes"
    assert {path.name for path in probes.iterdir() if path.is_dir()} == {SINGLE, CHAIN, UNTRAINED}
