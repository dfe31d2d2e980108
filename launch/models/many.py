"""Many queries from a file, answered into a file: batch by batch, so that a killed one goes on, and whole or absent."""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cory_env.tasks import Query
from launch.console.errors import CommandError
from launch.display.terminal import Voice
from launch.models.trained import Stored
from launch.models.trained_chain import TrainedChain
from launch.run_folder import manifest
from launch.run_folder.journal import Journal, replace_text
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


class Many(NamedTuple):
    """Queries to be answered, and where to."""

    trained: Stored
    chain: TrainedChain
    """Made for many queries."""
    queries: Sequence[Query]
    samples: int
    """Answers to each."""
    backend: str
    """`vllm` or `transformers`."""
    out: Path
    """The file: a row per query and sample, in order."""

    @property
    def batches(self) -> list[list[tuple[Query, int]]]:
        """All the work, in order."""
        deals = [(query, sample) for query in self.queries for sample in range(self.samples)]
        size = AT_ONCE[self.backend]
        return [deals[start : start + size] for start in range(0, len(deals), size)]

    @property
    def identity(self) -> dict[str, Any]:
        """All that the answers depend on, as JSON."""
        asked = repr([(query.raw, query.columns) for query in self.queries])
        return {
            "run": self.trained.run.shown(self.trained.run.path.resolve()),
            "checkpoint": [self.trained.update, zlib.crc32((self.trained.folder / manifest.NAME).read_bytes())],
            "roles": list(self.chain.players),
            "temperature": self.chain.temperature,
            "seed": self.chain.seed,
            "samples": self.samples,
            "backend": self.backend,
            "queries": zlib.crc32(asked.encode()),
        }

    def answer(self, voice: Voice) -> None:
        """Answers all into a new file; what was done by an earlier process that was to write the very same is kept.

        Args:
            voice: shows how far it is; a step is a batch.

        Raises:
            CommandError: another process is at it, or was meanwhile, the folder cannot be made, or the policies cannot
                be loaded.
            GenerationError, EngineStartError: the engine failed.
        """
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommandError(f"The folder {self.out.parent} cannot be made: {error.strerror}.") from error
        lock_file = self.out.with_name(f".{self.out.name}.lock")
        lock = try_lock(lock_file)
        if lock is None:
            raise CommandError(f"Another process writes {self.out}. Wait for it, or name another file with --out.")
        part = Journal(self.out.with_name(f".{self.out.name}.part"), number="batch")
        with lock:
            try:
                check_free(self.out)  # another process may have finished it while this one made ready
                self._answer(part, voice)
            finally:
                if len(part.read()) < 2:  # nothing is done that could be gone on with, or all is
                    part.path.unlink(missing_ok=True)
                    lock_file.unlink()

    def _answer(self, part: Journal, voice: Voice) -> None:
        """Does what is left to do; `part` keeps what is done, and is gone when the file is there."""
        batches, done = self.batches, self._begun(part)
        voice.set_back(done)
        if done:
            voice.say(f"{done} of {len(batches)} batches were done before.")
        if done < len(batches):
            voice.stage("Loading the policies")
            self.chain.load(self.backend, len(batches[0]))
        voice.stage("Answering")
        voice.begin()
        try:
            for number, batch in list(enumerate(batches))[done:]:
                part.append({"batch": number, "rows": self._rows(batch)})
                left = voice.advance()
                if not voice.has_bar:
                    voice.say(f"  {number + 1}/{len(batches)} batches  {left}")
        except KeyboardInterrupt:
            voice.say(f"{len(part.read()) - 1} of {len(batches)} batches are kept; the same command goes on.")
            raise
        rows = [row for each in part.read()[1:] for row in each["rows"]]
        replace_text(self.out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        part.path.unlink()

    def _begun(self, part: Journal) -> int:
        """Returns the number of batches that are done; begins anew where the file is to hold something else."""
        kept, identity = part.read(), self.identity
        if kept and kept[0].get("identity") == identity:
            part.cut_after(kept[-1]["batch"])  # what a kill left of a line
            return len(kept) - 1
        part.path.unlink(missing_ok=True)
        part.append({"batch": -1, "identity": identity})
        return 0

    def _rows(self, batch: Sequence[tuple[Query, int]]) -> list[dict[str, object]]:
        rows: list[dict[str, object]] = []
        for (query, sample), answered in zip(batch, self.chain.answer_all(batch), strict=True):
            columns = json.loads(json.dumps(query.columns, default=str))  # a table may hold dates and the like
            rows.append({"row": query.id, "sample": sample, **({"columns": columns} if columns else {}), **answered})
        return rows
