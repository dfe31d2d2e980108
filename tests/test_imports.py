"""Rules for the code's structure: imports only from lower layers, small folders, short files.

Lazy imports and imports for typing count too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = {
    "cory_rllib": ("", "__main__", "worker", "use", "runs"),
    "launch": (
        *("main", "commands", "experiments", "serving", "probing", "models", "evaluation", "training"),
        *("display", "run_folder", "cluster", "console"),
    ),
    "policies": (
        *(
            "checkpoint",
            "cory",
            "warm_start",
            "config",
            "role_exchange",
            "evaluator",
        ),
        *("sync_check", "report", "health", "worker_setup"),
        *("rollout", "rllib", "settings", "generation", "learning", "models", "compat", "files"),
    ),
    "cory_env": (
        "cory_v0",
        "prompt_lengths",
        "text_envs",
        "rewarding",
        "episode",
        "chain",
        "prompt_encoder",
        "decoding",
        "chain_settings",
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
"""Packages from the highest layer to the lowest, each with its folders and top-level modules in the same order. The
package itself, "", is the lowest layer by default."""
MAX_FILES, MAX_COMMANDS, MAX_LINES = 15, 20, 400
"""Maximum number of files per folder, of commands, and of lines per file."""


def modules() -> dict[str, Path]:
    """Returns the file of every module by module name; an `__init__` has the name of its package."""
    files_by_name = {}
    for package in LAYERS:
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            files_by_name[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return files_by_name


MODULES = modules()


def imports(module: str) -> Iterator[str]:
    """Yields our modules that a module imports, anywhere in its file."""
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{module} imports relatively"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                if submodule in MODULES or node.module in MODULES:
                    yield submodule if submodule in MODULES else node.module


IMPORTS = {module: sorted(set(imports(module))) for module in MODULES}


def layer(module: str) -> tuple[int, int]:
    """Returns the layer of a module as the indices of its package and its folder; smaller is higher."""
    package, _, submodules = module.partition(".")
    folders = LAYERS[package]
    folder = submodules.partition(".")[0]
    assert not folder or folder in folders, f"{module} has no layer: add its folder to LAYERS"
    return list(LAYERS).index(package), folders.index(folder) if folder in folders else len(folders)


def test_no_import_goes_from_a_lower_layer_to_a_higher_one() -> None:
    violations = [
        f"{module} -> {target}"
        for module, imported in IMPORTS.items()
        for target in imported
        if layer(target) < layer(module)
    ]
    assert not violations, violations


def test_there_are_no_import_cycles() -> None:
    visited: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in visited:
            for target in IMPORTS[module]:
                if target != module:
                    walk(target, (*path, module))
            visited.add(module)

    for module in IMPORTS:
        walk(module, ())


def test_packages_do_not_import_their_modules() -> None:
    importing_packages = [module for module, file in MODULES.items() if file.name == "__init__.py" and IMPORTS[module]]
    # `cory_rllib` imports lazily, and `cory_env.tasks` defines `make_task`.
    assert importing_packages == ["cory_rllib", "cory_env.tasks"], importing_packages


def folders() -> dict[str, list[Path]]:
    files_by_folder: dict[str, list[Path]] = {}
    for file in MODULES.values():
        if file.name != "__init__.py":
            files_by_folder.setdefault(file.parent.relative_to(ROOT).as_posix(), []).append(file)
    return files_by_folder


@pytest.mark.parametrize("folder", sorted(folders()))
def test_folders_are_small(folder: str) -> None:
    assert len(folders()[folder]) <= (MAX_COMMANDS if folder == "launch/commands" else MAX_FILES)


def test_files_are_short() -> None:
    other_files = [file for folder in ("tests", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
    files = [*MODULES.values(), *(file for file in other_files if not any(part[0] == "." for part in file.parts))]
    too_long = {
        str(file.relative_to(ROOT)): count
        for file in files
        if (count := len(file.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not too_long, too_long
