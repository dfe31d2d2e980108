"""The house rules: imports run one way, rooms and files stay small. Every import counts, lazy and typing ones too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[1]
FLOORS = {
    "cory_rllib": ("", "__main__", "worker", "use", "runs"),
    "launch": (
        *("main", "commands", "report", "experiments", "serving", "models", "evaluation", "training"),
        *("display", "run_folder", "cluster", "console"),
    ),
    "policies": (
        *(
            "influence",
            "checkpoint",
            "cory",
            "warm_start",
            "config",
            "role_exchange",
            "evaluator",
        ),
        *("sync_check", "report", "health", "metric_docs", "worker_setup"),
        *("rollout", "rllib", "settings", "generation", "learning", "models", "compat"),
    ),
    "cory_env": (
        "cory_v0",
        "validate",
        "rewarding",
        "episode",
        "chain",
        "chat",
        "tasks",
        "rewards",
        "sandbox",
        "control_tokens",
        "message",
        "tokenizer",
        "functions",
        "shadowing",
        "pickled",
        "home",
    ),
}
"""Packages from the top down, and in each its rooms (folders) and the files beside them, from the top down; the package
itself, "", at the bottom unless it says else."""
FILES, COMMANDS, LINES = 15, 20, 400
"""The most files of a room, of the room of commands, and lines of a file."""


def modules() -> dict[str, Path]:
    """Every module of the house, by its name; a folder's `__init__` by the folder's."""
    files_by_name = {}
    for package in FLOORS:
        for file in sorted((HOUSE / package).rglob("*.py")):
            parts = file.relative_to(HOUSE).with_suffix("").parts
            files_by_name[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return files_by_name


MODULES = modules()


def imports(module: str) -> Iterator[str]:
    """The modules of the house that a module imports, anywhere in its file."""
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{module} imports relatively"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in MODULES or node.module in MODULES:
                    yield inner if inner in MODULES else node.module


ARROWS = {module: sorted(set(imports(module))) for module in MODULES}


def floor(module: str) -> tuple[int, int]:
    """Where a module stands: its package's place and its room's, smaller is higher up."""
    package, _, rest = module.partition(".")
    rooms = FLOORS[package]
    room = rest.partition(".")[0]
    assert not room or room in rooms, f"{module} stands on no floor: add its room to FLOORS"
    return list(FLOORS).index(package), rooms.index(room) if room in rooms else len(rooms)


def test_no_import_goes_from_a_lower_layer_to_a_higher_one() -> None:
    upward = [
        f"{module} -> {other}" for module, others in ARROWS.items() for other in others if floor(other) < floor(module)
    ]
    assert not upward, upward


def test_there_are_no_import_cycles() -> None:
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for other in ARROWS[module]:
                if other != module:
                    walk(other, (*path, module))
            done.add(module)

    for module in ARROWS:
        walk(module, ())


def test_packages_do_not_import_their_modules() -> None:
    eager = [module for module, file in MODULES.items() if file.name == "__init__.py" and ARROWS[module]]
    assert eager == ["cory_rllib", "cory_env.tasks"], eager  # which imports lazily; where `make_task` is


def rooms() -> dict[str, list[Path]]:
    files_by_name: dict[str, list[Path]] = {}
    for file in MODULES.values():
        if file.name != "__init__.py":
            files_by_name.setdefault(file.parent.relative_to(HOUSE).as_posix(), []).append(file)
    return files_by_name


@pytest.mark.parametrize("room", sorted(rooms()))
def test_folders_are_small(room: str) -> None:
    assert len(rooms()[room]) <= (COMMANDS if room == "launch/commands" else FILES)


def test_files_are_short() -> None:
    beside = [file for room in ("tests", "benchmarks") for file in (HOUSE / room).rglob("*.py")]
    files = [*MODULES.values(), *(file for file in beside if not any(part[0] == "." for part in file.parts))]
    long = {
        str(file.relative_to(HOUSE)): count
        for file in files
        if (count := len(file.read_text(encoding="utf-8").splitlines())) > LINES
    }
    assert not long, long
