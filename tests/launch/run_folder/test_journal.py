import json
import math
import shutil
from pathlib import Path

import pytest

from launch.run_folder.journal import Journal
from policies.files import MissingFolderError, atomic_write


def test_records_round_trip_as_strict_json(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.append({"update": 1, "kl": math.nan, "roles": {"pioneer": "llm_1"}})
    assert journal.read() == [{"update": 1, "kl": None, "roles": {"pioneer": "llm_1"}}]
    assert "NaN" not in journal.path.read_text()


def test_an_incomplete_last_line_is_ignored_and_removed_on_resume(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    for update in range(4):
        journal.append({"update": update})
    with journal.path.open("a") as file:
        file.write('{"update": 4, "kl"')
    assert [record["update"] for record in journal.read()] == [0, 1, 2, 3]
    journal.cut_after(2)
    journal.append({"update": 3})
    lines = journal.path.read_text().splitlines()
    assert [json.loads(line)["update"] for line in lines] == [0, 1, 2, 3]


def test_a_missing_journal_is_empty_and_can_be_cut(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "samples.jsonl")
    journal.cut_after(0)
    assert journal.read() == []


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    journal = Journal(folder / "metrics.jsonl")
    journal.append({"update": 0})
    shutil.rmtree(folder)
    for write in (lambda: journal.append({"update": 1}), lambda: atomic_write(folder / "config.yaml", "seed: 0")):
        with pytest.raises(MissingFolderError, match="run no longer exists: it was removed or renamed"):
            write()
    assert not folder.exists()
