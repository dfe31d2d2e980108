"""Every command that README and docs show has the right form: subcommand, options, preset, settings, study's arms."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from launch.console.cli import parse_command
from launch.console.configuration import split_arguments
from launch.experiments.study import bundled_studies, load_study

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```.*?^```", flags=re.MULTILINE | re.DOTALL)
SUBMIT = r"(?:ray\sjob\ssubmit\s[^`]*?\s--\s+)?"
PROMPT = re.compile(rf"^(?:\$ )?{SUBMIT}((?:cory|python -m) .+)", flags=re.MULTILINE)
INLINE = re.compile(rf"`{SUBMIT}((?:cory|python\s-m)\s[^`]+)`")
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    *sorted(f"docs/{file.relative_to(ROOT / 'docs')}" for file in (ROOT / "docs").rglob("*.md")),
]


def commands(page: str) -> Iterator[list[str]]:
    """The words of each command that is shown with arguments; a bare `cory train` or `cory X --option` is a name."""
    for block in FENCE.findall(page):
        for line in PROMPT.findall(block.replace("\\\n", " ")):
            yield shlex.split(line.split(" < ")[0], comments=True)
    for text in INLINE.findall(FENCE.sub("", page)):
        words = shlex.split(text)
        if len(words) > 2 and not words[2].startswith("-"):
            yield words


@cache
def arms(study: str) -> set[str]:
    return set(load_study(study).arms)


def check(name: str, arguments: list[str]) -> None:
    """Parses a command as `cory` does, with its settings unless some are left out (…). Files need not exist."""
    shortened = "…" in arguments
    options = parse_command(name, [argument for argument in arguments if argument != "…"])
    words = [
        word for word in getattr(options, "words", None) or () if not word.endswith(".yaml") and not word.isupper()
    ]
    plain = [word for word in words if "=" not in word]
    if name == "study" and plain and plain[0] in bundled_studies():
        assert set(plain[1:]) <= arms(plain[0]), arguments
    elif name in ("train", "tune", "plan") and not shortened:
        split_arguments(words).settings()


@pytest.mark.parametrize("name", PAGES)
def test_every_command_of_a_page_is_valid(name: str) -> None:
    for program, *words in commands((ROOT / name).read_text(encoding="utf-8")):
        if program == "python" and words[1] == "cory_rllib":
            program, words = "cory", words[2:]
        if program == "cory" and words[0].islower():
            check(words[0], words[1:])
        elif program == "python" and words[1].split(".")[0] in ("benchmarks", "recipes"):
            module = ROOT / words[1].replace(".", "/")
            assert module.with_suffix(".py").exists() or (module / "__main__.py").exists(), words


def test_most_commands_are_checked() -> None:
    counts = {name: len(list(commands((ROOT / name).read_text(encoding="utf-8")))) for name in PAGES}
    assert counts["docs/lab/results.md"] > 60 and counts["docs/start.md"] > 6 and sum(counts.values()) > 240
