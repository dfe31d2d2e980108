"""`make demo`: a single agent and a chain, trained with as many generated tokens, in two to three minutes on two cores.

Trains both arms of the study `demo` with `cory train`, and measures them and the untrained model with `cory probe`, all
on the same test queries. Prints a table and an example, and draws both learning curves.

DIR/chain, DIR/single   the runs
DIR/probes/NAME         what `cory probe` measured
DIR/curves.png          held-out scores over generated tokens
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from rich.table import Table

from launch.console.errors import CommandError, make_folder
from launch.display.plot import COLOURS, STYLES, save_figure
from launch.display.tables import new_table, print_tables
from launch.experiments.study import Study, load_study
from launch.run_folder.frame import MEAN
from launch.run_folder.layout import new_folder
from launch.run_folder.records import Update
from launch.run_folder.run import Run
from recipes.sums import is_working

PRETRAINING = (
    "The bundled model drafts-llama-tiny (0.3 M parameters) was pre-trained to add three numbers in one step, badly,\n"
    "or to write an intermediate step, such as 109+035 for 48+61+35, and to use what another agent wrote before."
)
UNTRAINED, SINGLE, CHAIN = "untrained", "single", "chain"
SINGLE_LABEL, CHAIN_LABEL = "single agent", "chain, last answer"
SEED = 0
NUM_QUERIES, NUM_SAMPLES = 500, 3
"""Of the probes: test queries, and answers to each."""
POLL_SECONDS = 0.2


class Row(NamedTuple):
    """A row of the table: a way to answer, and the figure of a probe that measures it before and after training."""

    label: str
    figure: str
    trained: str
    """The trained run that answers this way."""


ROWS = (
    Row(SINGLE_LABEL, "one_answer", SINGLE),
    Row("  vote of 3 of its answers", "vote_of_3", SINGLE),
    Row("  its LLM, used as a chain", "chain", SINGLE),
    Row(CHAIN_LABEL, "chain", CHAIN),
)


class Probe(NamedTuple):
    """The result of `cory probe` at one temperature."""

    figures: Mapping[str, Mapping[str, Any]]
    """By name, an estimate with the tokens per query."""
    samples: Mapping[int, Mapping[str, Any]]
    """By query, its first sample: the `first` answer, and the `second` one of an agent that saw it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m recipes.demo", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="new folder of the demo [default: runs/demo-TIME]")
    options = parser.parse_args(argv)
    try:
        run_demo(load_study("demo"), options.out or new_folder("demo"))
    except CommandError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    return 0


def run_demo(study: Study, folder: Path) -> None:
    """Trains, measures, and shows the results.

    Args:
        study: The study `demo`, with the arms `single` and `chain`.
        folder: Where to write them.

    Raises:
        CommandError: A command failed.
    """
    start = time.monotonic()
    make_folder(folder)
    print(f"Adding three numbers, such as 48+61+35.\n{PRETRAINING}\n")
    updates = {name: _train(study, name, folder / name) for name in (SINGLE, CHAIN)}
    print("\nMeasuring the untrained model and both runs on the same test queries …", flush=True)
    settings = study.settings(study.arms[CHAIN], SEED)
    model = [settings.model_names, study.base, "dtype=fp32"]
    targets = {name: [str(folder / name), "--checkpoint", "latest"] for name in updates}
    probes = _probe({UNTRAINED: model, **targets}, folder / "probes")
    tokens = {name: curve(name, lines)[-1][0] for name, lines in updates.items()}
    print(f"\nShare of {NUM_QUERIES} test sums that are right [95 % CI], at equal tokens in training:\n")
    print_tables(sys.stdout, demo_table(probes, tokens))
    queries = [query.text for query in settings.make_task().queries("test")]
    print(f"\n{example(queries, probes)}\n")
    image = folder / "curves.png"
    save_figure(demo_plot(updates), image)
    print(f"Curves      {image}")
    print(f"Runs        {folder / SINGLE}, {folder / CHAIN}  (try: cory generate {folder / CHAIN} 48+61+35)")
    print(f"Five seeds  cory study demo --out {folder.with_name('demo-study')}")
    print(f"Took {time.monotonic() - start:.0f} s.")


def _train(study: Study, name: str, folder: Path) -> list[Update]:
    """Trains an arm, and prints each held-out score as soon as it is known; returns the lines of `metrics.jsonl`."""
    arm = study.arms[name]
    words = [word for word in study.words(arm, SEED) if not word.startswith("test_queries=")]  # the probes use more
    num_updates = study.settings(arm, SEED).num_updates
    print(f"Training: {arm.label}, {num_updates} updates. Held-out score:", end="", flush=True)
    output, num_printed, is_done = folder.with_suffix(".txt"), 0, False
    with _start(["train", *words, "--quiet", "--out", str(folder)], output) as process:
        while not is_done:
            is_done = process.poll() is not None
            points = curve(name, Run(folder).metrics)
            print(*(f" {score:.0%}" for _, score in points[num_printed:]), sep="", end="", flush=True)
            num_printed = len(points)
            time.sleep(0 if is_done else POLL_SECONDS)
    print()
    _check(process, output)
    return Run(folder).metrics


def _probe(targets: Mapping[str, Sequence[str]], folder: Path) -> dict[str, Probe]:
    """Measures runs, or models with settings, at temperature 1 and at the same time; returns the results by name."""
    options = ["--queries", str(NUM_QUERIES), "--samples", str(NUM_SAMPLES), "--temperatures", "1", "--quiet"]
    make_folder(folder)
    outputs = {name: folder / f"{name}.txt" for name in targets}
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(_start(["probe", *words, *options, "--out", str(folder / name)], outputs[name]))
            for name, words in targets.items()
        }
        for name, process in processes.items():
            _check(process, outputs[name])
    return {name: _read_probe(folder / name) for name in targets}


def _read_probe(folder: Path) -> Probe:
    lines = [json.loads(line) for line in (folder / "responses.jsonl").read_text("utf-8").splitlines()]
    samples = {sample["query"]: sample for sample in lines if sample["sample"] == 0}
    return Probe(json.loads((folder / "probe.json").read_text("utf-8"))["results"][0]["figures"], samples)


def _start(words: Sequence[str], output: Path) -> "subprocess.Popen[bytes]":
    """Starts a `cory` command that writes its output into a file."""
    with output.open("wb") as file:
        file.write(f"$ {shlex.join(['cory', *words])}\n".encode())
        file.flush()
        command = [sys.executable, "-m", "cory_rllib", *words]
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)


def _check(process: "subprocess.Popen[bytes]", output: Path) -> None:
    """Waits for a command.

    Raises:
        CommandError: It failed.
    """
    if process.wait():
        lines = output.read_text("utf-8", "replace").splitlines()
        errors = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
        raise CommandError(f"A command of the demo failed, see {output}: {(errors or lines)[-1]}")


def curve(name: str, lines: Sequence[Update]) -> list[tuple[int, float]]:
    """Returns the held-out scores of an arm: the generated tokens so far, and the share of right answers.

    Args:
        name: `chain`, whose last answer counts, or `single`.
        lines: The lines of `metrics.jsonl`.
    """
    points, tokens = [], 0
    for line in lines:
        tokens += line.get("tokens", 0)
        if "evaluation" in line:
            figures = line["last_response"] if name == CHAIN else line["evaluation"][MEAN]
            points.append((tokens, figures["task_reward"] or 0.0))
    return points


def demo_table(probes: Mapping[str, Probe], tokens: Mapping[str, int]) -> Table:
    """Returns the table of all ways to answer, before and after training.

    Args:
        probes: By `untrained` and arm.
        tokens: By arm, the tokens that its training generated.
    """
    rows = []
    for row in ROWS:
        before, after = (probes[name].figures[row.figure] for name in (UNTRAINED, row.trained))
        training = f"{tokens[row.trained]:,}" if row.label in (SINGLE_LABEL, CHAIN_LABEL) else ""
        rows.append([row.label, _share(before), _share(after), f"{after['tokens']:.1f}", training])
    return new_table([""], ["untrained", "trained", "tokens per sum", "tokens in training"], rows)


def _share(figure: Mapping[str, Any]) -> str:
    return f"{figure['mean']:.0%} [{figure['low'] * 100:.0f}, {figure['high'] * 100:.0f}]"


def example(queries: Sequence[str], probes: Mapping[str, Probe]) -> str:
    """Returns a test query with its answers: the first that the trained chain answers right and the others wrong.

    Args:
        queries: The texts of the test queries.
        probes: By `untrained` and arm.
    """
    chain, single, before = (probes[name].samples for name in (CHAIN, SINGLE, UNTRAINED))
    wanted = [query for query in chain if chain[query]["second"]["task_reward"] == 1.0]
    contrasts = [
        query
        for query in wanted
        if before[query]["second"]["task_reward"] == single[query]["first"]["task_reward"] == 0.0
    ]
    query = [*contrasts, *wanted, *chain][0]
    lines = [
        f"{'An example in which they differ,' if contrasts else 'For example'} {queries[query]}:",
        f"  single agent, trained   {_answer(single[query]['first'])}",
        f"  chain, untrained        {_chain_answers(before[query])}",
        f"  chain, trained          {_chain_answers(chain[query])}",
    ]
    return "\n".join(lines)


def _chain_answers(sample: Mapping[str, Any]) -> str:
    first = sample["first"]["text"]
    draft = f"{first} (a step)" if is_working(first) else first
    return f"pioneer {draft}, observer {_answer(sample['second'])}"


def _answer(response: Mapping[str, Any]) -> str:
    return f"{response['text']} ({'right' if response['task_reward'] == 1.0 else 'wrong'})"


def demo_plot(updates: Mapping[str, Sequence[Update]]) -> Figure:
    """Plots the held-out scores of both arms over generated tokens.

    Args:
        updates: By arm, the lines of `metrics.jsonl`.
    """
    figure = Figure(figsize=(4.6, 3.6), dpi=200, layout="constrained")
    axes = figure.subplots()
    for name, label, colour in ((CHAIN, CHAIN_LABEL, COLOURS[0]), (SINGLE, SINGLE_LABEL, COLOURS[1])):
        tokens, scores = zip(*curve(name, updates[name]), strict=True)
        axes.plot([count / 1000 for count in tokens], scores, label=label, color=colour, **STYLES["bare"])
    axes.set(title="Sums of three numbers", ylim=(0, 1))
    axes.set(xlabel="generated tokens, in thousands", ylabel="held-out sums that are right")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.legend()
    return figure


if __name__ == "__main__":
    sys.exit(main())
