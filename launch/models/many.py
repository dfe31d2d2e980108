"""Many queries from a file, answered into a file: batch by batch, so that a killed one goes on, and whole or absent."""

import json
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

from cory_env.tasks import Query
from launch.console.errors import CommandError
from launch.display.terminal import Voice
from launch.evaluation.batches import Batches
from launch.models.trained import Stored
from launch.models.trained_chain import TrainedChain
from launch.run_folder import manifest
from launch.run_folder.journal import replace_text
from launch.run_folder.locks import try_lock
from launch.run_folder.storage import check_place

AT_ONCE = {"vllm": 256, "transformers": 32}
"""Responses that are generated at the same time, at most; a kill costs as many."""
OTHERS = (".csv", ".parquet", ".json")
"""Endings of files of another kind than is written."""


def check_free(out: Path) -> None:
    """Refuses a place for answers that is taken.

    Raises:
        CommandError: something is there, its name says that it is no JSON Lines, or it would be gone with a job.
    """
    check_place(str(out), "file")
    if out.suffix in OTHERS:
        raise CommandError(f"{out}: answers are written as JSON Lines. End its name in .jsonl.")
    if out.exists():
        raise CommandError(f"{out} is there already: remove it, or name another file with --out.")


def answer_file(
    trained: Stored,
    chain: TrainedChain,
    queries: Sequence[Query],
    out: Path,
    *,
    samples: int = 1,
    backend: str = "transformers",
    bar: bool = True,
) -> None:
    """Answers queries into a new file: a row per query and sample, in order.

    What an earlier process did that was to write the very same is kept.

    Args:
        trained: whose the policies are.
        chain: made of them for many queries.
        queries: are answered.
        out: the file.
        samples: answers to each query.
        backend: `vllm` or `transformers`.
        bar: show a bar, if this is a terminal.

    Raises:
        CommandError: another process is at it, or was meanwhile, the folder cannot be made, or the policies cannot be
            loaded.
        GenerationError, EngineStartError: the engine failed.
    """
    deals = [(query, sample) for query in queries for sample in range(samples)]
    size = AT_ONCE[backend]
    work = [deals[start : start + size] for start in range(0, len(deals), size)]
    identity = {
        "run": trained.run.shown(trained.run.path.resolve()),
        "checkpoint": [trained.update, zlib.crc32((trained.folder / manifest.NAME).read_bytes())],
        "roles": list(chain.players),
        "temperature": chain.temperature,
        "seed": chain.seed,
        "samples": samples,
        "backend": backend,
        "queries": zlib.crc32(repr([(query.raw, query.columns) for query in queries]).encode()),
    }
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"The folder {out.parent} cannot be made: {error.strerror}.") from error
    lock_file, part = (out.with_name(f".{out.name}.{ending}") for ending in ("lock", "part"))
    lock = try_lock(lock_file)
    if lock is None:
        raise CommandError(f"Another process writes {out}. Wait for it, or name another file with --out.")
    with lock:
        batches = Batches(part, identity, work, restart=True)
        try:
            check_free(out)  # another process may have finished it while this one made ready
            with Voice(sys.stderr, len(work), done=batches.done, bar=bar) as voice:
                _answer(chain, batches, backend, voice)
            rows = [row for batch in batches.results for row in batch["rows"]]
            replace_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            part.unlink()
        finally:
            if not part.exists() or not batches.done:  # nothing is left to continue
                part.unlink(missing_ok=True)
                lock_file.unlink()


def _answer(chain: TrainedChain, batches: Batches[list[tuple[Query, int]]], backend: str, voice: Voice) -> None:
    if batches.done:
        voice.say(f"{batches.done} of {len(batches.work)} batches were done before.")
    if batches.done < len(batches.work):
        voice.stage("Loading the policies")
        chain.load(backend, len(batches.work[0]))
    voice.stage("Answering")

    def answer(deals: list[tuple[Query, int]]) -> dict[str, object]:
        rows: list[dict[str, object]] = []
        for (query, sample), answered in zip(deals, chain.answer_all(deals), strict=True):
            columns = json.loads(json.dumps(query.columns, default=str))  # a table may hold dates and the like
            rows.append({"row": query.id, "sample": sample, **({"columns": columns} if columns else {}), **answered})
        return {"rows": rows}

    try:
        batches.run(answer, voice)
    except KeyboardInterrupt:
        voice.say(batches.progress)
        raise
