"""Rules for names: no participles and function words as identifiers, and one meaning per public name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("cory_env", "policies", "launch", "cory_rllib")
FOLDERS = (*PACKAGES, "recipes", "benchmarks", "tests")
FORBIDDEN = {
    *("found", "made", "said", "told", "kept", "given", "held", "asked", "paid", "taught", "lent", "dealt"),
    *("what", "who", "of", "there", "where", "worth", "alike", "luck", "place", "places"),
    *("llm", "llms", "player", "players"),
}
"""Names that do not say what they hold. Which LLM is always called `policy_id`, a path `path` and an index `index`."""
FORMAT_FIELDS = {("launch/run_folder/sources.py", "llms"), ("launch/experiments/contrasts.py", "of")}
"""Fields with these names in file formats, which must not change."""
SHARED_NAMES = {"main", "load", "save", "Run", "train", "evaluate", "generate", "export", "serve", "validate"}
"""Public names that several modules may define: entry points, protocols, and names in `cory_rllib` and `launch`."""
SPEC_FOLDERS = ("cory_env/rewards/", "cory_env/tasks/")
"""Folders whose functions always appear with their module, as in the setting `reward=MODULE:FUNCTION`."""


def python_files(folders: tuple[str, ...]) -> Iterator[tuple[str, ast.Module]]:
    """Yields the paths relative to the root and the syntax trees of all Python files in folders."""
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            path = file.relative_to(ROOT)
            if not any(part.startswith(".") for part in path.parts):
                yield path.as_posix(), ast.parse(file.read_text(encoding="utf-8"))


def defined_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the lines and names of all variables, attributes, parameters, functions, classes and aliases."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name
            case ast.alias(asname=str(name)):
                yield node.lineno, name


def test_names_say_what_they_hold() -> None:
    violations = [
        f"{path}:{line}: {name}"
        for path, tree in python_files(FOLDERS)
        for line, name in sorted(set(defined_names(tree)))
        if name.strip("_").lower() in FORBIDDEN and (path, name) not in FORMAT_FIELDS
    ]
    assert not violations, "\n".join(["Rename these to nouns for what they hold:", *violations])


def test_public_functions_and_classes_have_one_meaning() -> None:
    definitions: dict[str, list[str]] = defaultdict(list)
    for path, tree in python_files(PACKAGES):
        for node in tree.body:
            if (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                and not node.name.startswith("_")
                and not path.startswith(SPEC_FOLDERS)
                and path != f"launch/commands/{node.name}.py"  # a command has the name of its module
            ):
                definitions[node.name].append(f"{path}:{node.lineno}")
    violations = [
        f"{name}: {', '.join(lines)}"
        for name, lines in sorted(definitions.items())
        if len(lines) > 1 and name not in SHARED_NAMES
    ]
    assert not violations, "\n".join(["Give each of these a specific name:", *violations])
