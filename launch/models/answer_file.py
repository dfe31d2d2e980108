"""Answers the queries of a file, batch by batch; the output file appears atomically."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from cory_env.tasks import Query
from launch.console import output
from launch.console.errors import CommandError, make_folder
from launch.display.terminal import ProgressPrinter
from launch.evaluation.batches import show_progress, write_lines
from launch.models.trained_chain import MAX_BATCH_SIZE, TrainedChain
from launch.run_folder.storage import check_location


def check_output_free(out: Path) -> None:
    """Checks that answers can be written to a path."""
    check_location(str(out), "file")
    if out.suffix in (".csv", ".parquet", ".json"):
        raise CommandError(f"{out}: answers are written as JSON Lines. Use the suffix .jsonl.")
    if out.exists():
        raise CommandError(f"{out} exists already. Remove it, or choose another file with --out.")


def write_answers(
    chain: TrainedChain, queries: Sequence[Query], out: Path, *, samples: int = 1, debug: bool = False
) -> None:
    """Answers queries and writes the answers to a file, one row per query and sample, in order.

    Args:
        out: the file; it must not exist.
        debug: libraries print to the terminal, so there is no progress bar.
    """
    prompt_refs = [(query, sample) for query in queries for sample in range(samples)]
    size = MAX_BATCH_SIZE[chain.backend]
    batches = [prompt_refs[start : start + size] for start in range(0, len(prompt_refs), size)]
    make_folder(out.parent)
    with ProgressPrinter(sys.stderr, len(batches), bar=not debug) as progress:
        progress.stage("Loading the models")
        with output.hide_libraries(debug):
            _ = chain.generator  # loads the policies
        progress.stage("Answering")
        progress.start_clock()
        results = show_progress((_answer_rows(batch, chain) for batch in batches), len(batches), progress)
        rows = [row for batch_rows in results for row in batch_rows]
    write_lines(out, rows)


def _answer_rows(prompt_refs: Sequence[tuple[Query, int]], chain: TrainedChain) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for (query, sample), answer in zip(prompt_refs, chain.answer_all(prompt_refs), strict=True):
        columns = json.loads(json.dumps(query.columns, default=str))  # a table may contain dates and similar types
        rows.append({"row": query.id, "sample": sample, **({"columns": columns} if columns else {}), **answer})
    return rows
