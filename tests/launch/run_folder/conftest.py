"""A run in storage."""

from pathlib import Path

import pytest

from launch.run_folder.directory import RunDirectory
from launch.run_folder.mirror import create_run
from policies.settings.settings import Settings
from tests.launch.run_folder.test_checkpoints import write

SETTINGS = Settings(updates=12, keep_checkpoints=2)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, where runs in storage work."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def stored_run(place: Path) -> RunDirectory:
    """A run with checkpoints of the updates 0 and 6, in storage and in the local folder where it works."""
    made = create_run(f"file://{place}")
    made.write_settings(SETTINGS, "cory train")
    for update in range(7):
        made.metrics.append({"update": update})
        if update in (0, 6):
            made.checkpoints.save(update, write)
            made.mirror(keep=2)
    return made
