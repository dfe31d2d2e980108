"""The summary of a finished run: held-out metrics and samples before and after training, and file locations."""

from importlib.util import find_spec

from rich.table import Table
from rich.text import Text

from launch.display.tables import MAIN_METRICS, format_metric, held_out_pairs, metric_format, new_table
from launch.display.terminal import Terminal
from launch.display.texts import chain_text
from launch.run_folder.records import Update
from launch.run_folder.run import Run
from launch.run_folder.sources import Sources
from policies.settings.settings import Settings

SUMMARY_METRICS = (*MAIN_METRICS, "response_length", "eos_rate")
MIN_WIDE_TERMINAL = 78
"""Terminals narrower than this many characters show only the main metrics."""


def print_summary(run: Run, settings: Settings, terminal: Terminal) -> None:
    """Prints the summary of a run whose last update was evaluated."""
    evaluations = [line for line in run.metrics if "evaluation" in line]
    first, last = evaluations[0], evaluations[-1]
    updates = f"update {first['update']} {terminal.arrow} {last['update']}"
    terminal.print()
    chain = ", and the chain's last answer" if "last_response" in last else ""
    terminal.print(Text(f"Held-out queries, each policy alone{chain}, {updates}", style="bold"))
    terminal.print(before_and_after_table(first, last, terminal))
    if note := last_answer_note(first, last, arrow=terminal.arrow):
        terminal.print(note)
    sources = Sources.read(run.path)
    changes = [] if sources is None else [change for change in sources.changes if change["part"] != "train"]
    for update, text in {change["update"]: change["text"] for change in changes}.items():
        terminal.print(f"Warning: Metrics before and after update {update} are not comparable. {text}.", True)
    samples = [sample for sample in run.samples if sample["held_out"]]
    before, after = ([sample for sample in samples if sample["update"] == line["update"]] for line in (first, last))
    for earlier, later in list(zip(before, after, strict=False))[: max(6 // settings.num_agents, 1)]:
        for update, sample in ((first["update"], earlier), (last["update"], later)):
            terminal.print(Text(f"\nA held-out query at update {update}", style="bold"))
            terminal.print(chain_text(sample, indent=2))
    best = run.best_update
    terminal.print()
    terminal.print(f"Curves      {run.user_path(run.curves.name)}", True)
    if best is not None:  # None if the reward failed in every evaluation
        terminal.print(f"Best        {run.user_path('checkpoints/best')}, from update {best}", True)
    if best == 0:
        terminal.print(
            f"Warning: No evaluation beat update 0 (select_by={settings.select_by}), so `best` has the weights before "
            "training, which other commands use by default. `--checkpoint latest` selects the trained ones.",
            True,
        )
    if find_spec("tensorboard") is None:
        terminal.print(f"TensorBoard pip install tensorboard; tensorboard --logdir {run.location}")
    terminal.print(f"Longer      {run.resume_command()} num_updates={2 * settings.num_updates}", True)


def last_answer_note(*lines: Update, arrow: str) -> str | None:
    """Explains the KL of the chain's last answers in evaluations; None if there is none.

    Before training it may be large, because the last agent's prompt has more than the query.
    """
    in_chain = [line["last_response"].get("in_chain_kl") for line in lines if "last_response" in line]
    if len(in_chain) < len(lines) or None in in_chain:
        return None
    values = f" {arrow} ".join(format_metric("kl", value) for value in in_chain)
    return (
        "KL of the last answer: to the base model given the query alone, so the last agent's longer prompt adds to it. "
        f"Given the same prompt: {values}."
    )


def before_and_after_table(first: Update, last: Update, terminal: Terminal) -> Table:
    """Returns a table of each policy's held-out metrics at two updates."""
    columns = SUMMARY_METRICS if terminal.console.width >= MIN_WIDE_TERMINAL else MAIN_METRICS
    arrow = f" {terminal.arrow} "
    rows = [
        [name, *(arrow.join(format_metric(key, figures[key]) for figures in pair) for key in columns)]
        for name, pair in held_out_pairs(first, last).items()
    ]
    return new_table([""], [metric_format(key).heading for key in columns], rows)
