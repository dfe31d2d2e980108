import json
import math
import shutil
from pathlib import Path

import pytest

from launch.console.errors import CommandError
from launch.run_folder.journal import Journal, atomic_write


def test_records_come_back_as_strict_json(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.append({"update": 1, "kl": math.nan, "roles": {"pioneer": "llm_1"}})
    assert journal.read() == [{"update": 1, "kl": None, "roles": {"pioneer": "llm_1"}}]
    assert "NaN" not in journal.path.read_text()


def test_what_a_kill_left_of_a_line_is_no_record_and_goes_when_the_run_goes_on(tmp_path: Path) -> None:
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


def test_a_journal_not_begun_is_empty_and_can_be_cut(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "samples.jsonl")
    journal.cut_after(0)
    assert journal.read() == []


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    journal = Journal(folder / "metrics.jsonl")
    journal.append({"update": 0})
    shutil.rmtree(folder)
    for write in (lambda: journal.append({"update": 1}), lambda: atomic_write(folder / "config.yaml", "seed: 0")):
        with pytest.raises(CommandError, match="run no longer exists: it was removed or renamed"):
            write()
    assert not folder.exists()
