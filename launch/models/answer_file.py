"""Answers the queries of a file, batch by batch; an interrupted job resumes, and the output file appears atomically."""

import json
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

from cory_env.pickled import display_name
from cory_env.tasks import Query
from launch.console import output
from launch.console.errors import CommandError, make_folder
from launch.display.terminal import ProgressPrinter
from launch.evaluation.batches import Batches
from launch.models.trained import PolicySet
from launch.models.trained_chain import MAX_BATCH_SIZE, TrainedChain
from launch.run_folder.locks import try_lock
from launch.run_folder.sources import digest_function
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
    trained: PolicySet,
    chain: TrainedChain,
    queries: Sequence[Query],
    out: Path,
    *,
    samples: int = 1,
    debug: bool = False,
) -> None:
    """Answers queries and writes the answers to a file, one row per query and sample, in order.

    Batches of an interrupted call with the same arguments are reused.

    Args:
        out: the file; it must not exist.
        debug: libraries print to the terminal, so there is no progress bar.
    """
    prompt_refs = [(query, sample) for query in queries for sample in range(samples)]
    size = MAX_BATCH_SIZE[chain.backend]
    work = [prompt_refs[start : start + size] for start in range(0, len(prompt_refs), size)]
    identity = {
        "run": trained.location,
        "checkpoint": trained.metrics[-1],
        "roles": list(chain.policy_ids),
        "temperature": chain.temperature,
        "seed": chain.seed,
        "samples": samples,
        "backend": chain.backend,
        **_feedback_identity(chain),
        "queries": zlib.crc32(repr([(query.raw, query.columns) for query in queries]).encode()),
    }
    make_folder(out.parent)
    part_file, lock_file = (out.with_name(f".{out.name}.{suffix}") for suffix in ("part", "lock"))
    lock = try_lock(lock_file)
    if lock is None:
        raise CommandError(f"Another process writes {out}. Wait for it, or choose another file with --out.")
    with lock:
        batches = Batches(part_file, identity, work, restart=True)
        with ProgressPrinter(sys.stderr, len(work), done=batches.done, bar=not debug) as progress:
            progress.stage("Loading the models")
            with output.hide_libraries(debug):
                _ = chain.generator  # loads the policies
            progress.stage("Answering")
            batches.run(lambda batch: {"rows": _answer_rows(batch, chain)}, progress)
        rows = [row for batch in batches.results for row in batch["rows"]]
        atomic_write(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        part_file.unlink()
        lock_file.unlink()


def _feedback_identity(chain: TrainedChain) -> dict[str, object]:
    if chain.worker is None or chain.chain.task.feedback is None:
        return {}
    return {"feedback": [display_name(chain.chain.task.feedback), digest_function(chain.chain.task.feedback)]}


def _answer_rows(prompt_refs: Sequence[tuple[Query, int]], chain: TrainedChain) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for (query, sample), answer in zip(prompt_refs, chain.answer_all(prompt_refs), strict=True):
        columns = json.loads(json.dumps(query.columns, default=str))  # a table may contain dates and similar types
        rows.append({"row": query.id, "sample": sample, **({"columns": columns} if columns else {}), **answer})
    return rows
