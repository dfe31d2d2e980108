"""Answers the queries of a file, batch by batch; the output file appears atomically."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from cory_env.tasks import Query
from launch.console import output
from launch.console.errors import CommandError, make_folder
from launch.display.terminal import ProgressPrinter
from launch.evaluation.batches import show_progress
from launch.models.trained_chain import MAX_BATCH_SIZE, TrainedChain
from launch.run_folder.storage import check_location
from policies.files import atomic_write


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
        debug: libraries print to the terminal, so there is no progress bar.
    """
    make_folder(out.parent)
    prompt_refs = [(query, sample) for query in queries for sample in range(samples)]
    size = MAX_BATCH_SIZE[chain.backend]
    batches = [prompt_refs[start : start + size] for start in range(0, len(prompt_refs), size)]
    with ProgressPrinter(sys.stderr, len(batches), bar=not debug) as progress:
        progress.stage("Loading the models")
        with output.hide_libraries(debug):
            _ = chain.generator  # loads the policies
        progress.stage("Answering")
        progress.start_clock()
        answers = show_progress(map(chain.answer_all, batches), len(batches), progress)
        rows = [
            {"row": query.id, "sample": sample, **({"columns": query.columns} if query.columns else {}), **answer}
            for batch, batch_answers in zip(batches, answers, strict=True)
            for (query, sample), answer in zip(batch, batch_answers, strict=True)
        ]
    # A table may contain dates and similar types.
    atomic_write(out, "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows))
