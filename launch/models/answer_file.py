"""Many queries from a file, answered into a file: batch by batch, so that a killed one goes on, and whole or absent."""

import json
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

from cory_env.tasks import Query
from launch.console.errors import CommandError, make_folder
from launch.display.terminal import ProgressPrinter
from launch.evaluation.batches import Batches
from launch.models.trained import PolicySet
from launch.models.trained_chain import MAX_BATCH_SIZE, TrainedChain
from launch.run_folder.journal import atomic_write
from launch.run_folder.locks import try_lock
from launch.run_folder.storage import check_location


def check_output_free(out: Path) -> None:
    """Refuses a place for answers that is taken.

    Raises:
        CommandError: something is there, its name says that it is no JSON Lines, or it would be gone with a job.
    """
    check_location(str(out), "file")
    if out.suffix in (".csv", ".parquet", ".json"):
        raise CommandError(f"{out}: answers are written as JSON Lines. End its name in .jsonl.")
    if out.exists():
        raise CommandError(f"{out} is there already: remove it, or name another file with --out.")


def write_answers(
    trained: PolicySet, chain: TrainedChain, queries: Sequence[Query], out: Path, *, samples: int = 1, bar: bool = True
) -> None:
    """Answers queries into a new file: a row per query and sample, in order.

    What an earlier process did that was to write the very same is kept.

    Args:
        trained: whose the policies are.
        chain: made of them.
        queries: are answered.
        out: the file.
        samples: answers to each query.
        bar: show a bar, if this is a terminal.

    Raises:
        CommandError: another process is at it, the folder cannot be made, or the policies cannot be loaded.
        GenerationError, EngineStartError: the engine failed.
    """
    prompt_refs = [(query, sample) for query in queries for sample in range(samples)]
    size = MAX_BATCH_SIZE[chain.backend]
    work = [prompt_refs[start : start + size] for start in range(0, len(prompt_refs), size)]
    identity = {
        "run": trained.place,
        "checkpoint": trained.lines[-1],
        "roles": list(chain.policy_ids),
        "temperature": chain.temperature,
        "seed": chain.seed,
        "samples": samples,
        "backend": chain.backend,
        "queries": zlib.crc32(repr([(query.raw, query.columns) for query in queries]).encode()),
    }
    make_folder(out.parent)
    part, lock_file = (out.with_name(f".{out.name}.{ending}") for ending in ("part", "lock"))
    lock = try_lock(lock_file)
    if lock is None:
        raise CommandError(f"Another process writes {out}. Wait for it, or name another file with --out.")
    with lock:
        batches = Batches(part, identity, work, restart=True)
        with ProgressPrinter(sys.stderr, len(work), done=batches.done, bar=bar) as voice:
            voice.stage("Answering")
            batches.run(lambda prompt_refs: {"rows": _rows(prompt_refs, chain)}, voice)
        rows = [row for batch in batches.results for row in batch["rows"]]
        atomic_write(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        part.unlink()
        lock_file.unlink()


def _rows(prompt_refs: Sequence[tuple[Query, int]], chain: TrainedChain) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for (query, sample), answered in zip(prompt_refs, chain.answer_all(prompt_refs), strict=True):
        columns = json.loads(json.dumps(query.columns, default=str))  # a table may hold dates and the like
        rows.append({"row": query.id, "sample": sample, **({"columns": columns} if columns else {}), **answered})
    return rows
