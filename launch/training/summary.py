"""The summary of a finished run: held-out metrics before and after training, and file locations."""

from rich.table import Table
from rich.text import Text

from launch.display.tables import MAIN_METRICS, format_metric, held_out_pairs, metric_format, new_table
from launch.display.terminal import Terminal
from launch.run_folder.records import Update
from launch.run_folder.run import Run
from launch.run_folder.sources import Sources
from policies.settings.settings import Settings

SUMMARY_METRICS = (*MAIN_METRICS, "response_length", "eos_rate")


def print_summary(run: Run, settings: Settings, terminal: Terminal) -> None:
    """Prints the summary of a run whose last update was evaluated."""
    evaluations = [line for line in run.metrics if "evaluation" in line]
    first, last = evaluations[0], evaluations[-1]
    updates = f"update {first['update']} {terminal.arrow} {last['update']}"
    terminal.print()
    chain = ", and the chain's last answer" if "last_response" in last else ""
    terminal.print(Text(f"Held-out queries, each policy alone{chain}, {updates}", style="bold"))
    terminal.print(before_and_after_table(first, last, terminal.arrow))
    sources = Sources.read(run.path)
    changes = [] if sources is None else [change for change in sources.changes if change["part"] != "train"]
    for update, text in {change["update"]: change["text"] for change in changes}.items():
        terminal.print(f"Warning: Metrics before and after update {update} are not comparable. {text}.", True)
    best = run.best_update
    terminal.print()
    terminal.print(f"Curves      {run.user_path(run.curves)}", True)
    if best is not None:  # None if the reward failed in every evaluation
        terminal.print(f"Best        {run.user_path(run.checkpoints.folder / 'best')}, from update {best}", True)
    if best == 0:
        terminal.print(
            f"Warning: No evaluation beat update 0 (select_by={settings.select_by}), so `best` has the weights before "
            "training, which other commands use by default. `--checkpoint latest` selects the trained ones.",
            True,
        )
    terminal.print(f"Longer      {run.resume_command()} num_updates={2 * settings.num_updates}", True)


def before_and_after_table(first: Update, last: Update, arrow: str) -> Table:
    """Returns a table of each policy's held-out metrics at two updates."""
    rows = [
        [name, *(f" {arrow} ".join(format_metric(key, figures[key]) for figures in pair) for key in SUMMARY_METRICS)]
        for name, pair in held_out_pairs(first, last).items()
    ]
    return new_table([""], [metric_format(key).heading for key in SUMMARY_METRICS], rows)
