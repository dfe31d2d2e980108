"""The site builds without a warning, has an entry for whatever has a name, and no link of it leads nowhere."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pages
import pytest
import reference

from launch.console.cli import COMMANDS, command, parsed
from launch.console.configuration import split_words
from launch.experiments.study import load, studies
from policies.settings.files import presets
from policies.settings.settings import Settings

HOUSE = Path(__file__).parents[2]
DOCS = HOUSE / "docs"
COMMAND = re.compile(r"`((?:cory|python -m) [^`]+)`")


class Read(HTMLParser):
    """What a page can be linked at, and what it links to."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value and not urlsplit(value).scheme:
                self.links.add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Read]:
    """The pages of a site that was just built, by their files."""
    folder = tmp_path_factory.mktemp("site")
    words = ["-q", "-W", "--keep-going", "-d", folder / "read", DOCS, folder / "html"]
    command = [sys.executable, "-m", "sphinx", *map(str, words)]
    built = subprocess.run(command, cwd=HOUSE, capture_output=True, text=True)
    assert (built.returncode, built.stderr) == (0, "")
    return {file: Read(file) for file in (folder / "html").rglob("*.html")}


def page(site: dict[Path, Read], name: str) -> Read:
    (found,) = [read for file, read in site.items() if file.as_posix().endswith(f"/html/{name}.html")]
    return found


def test_every_setting_command_option_and_preset_has_its_entry(site: dict[Path, Read]) -> None:
    assert {f"confval-{name}" for name in Settings.model_fields} <= page(site, "reference/settings").anchors
    assert presets().keys() <= page(site, "reference/presets").anchors
    commands = page(site, "reference/commands").anchors
    assert {f"cory-{name}" for name in COMMANDS} <= commands
    for name in COMMANDS:
        words = {word for parameter in command(name).params for word in parameter.opts if word.startswith("-")}
        options = {f"cmdoption-cory-{name}-{word.lstrip('-')}" for word in words}
        assert options <= commands


def test_what_a_setting_takes_is_said_in_words() -> None:
    said = {name: reference.kind(field) for name, field in Settings.model_fields.items()}
    assert said["lr"] == "number > 0"
    assert said["gpus_per_runner"] == "number ≥ 0 or null"
    assert said["max_lag"] == "whole number ≥ 0, ≤ 1"
    assert said["exchange_period"] == "whole number ≥ 1 or null"
    assert said["weight_transfer"] == "`gloo`, `nccl`, `ipc` or null"
    assert said["model"] == "text or list of texts"


def test_no_link_leads_nowhere(site: dict[Path, Read]) -> None:
    lost = []
    for file, read in site.items():
        for link in read.links:
            path, anchor = urlsplit(link).path, unquote(urlsplit(link).fragment)
            target = (file.parent / unquote(path)).resolve() if path else file
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (anchor and target in site and anchor not in site[target].anchors):
                lost.append(f"{file.name} -> {link}")
    assert not lost, lost


def anchors(text: str) -> set[str]:
    """The anchors of a Markdown page's headings, as GitHub makes them."""
    prose = re.sub(r"(?ms)^```.*?^```", "", text)
    headings = re.findall(r"(?m)^#+ (.+)$", prose)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"])
def test_no_link_of_the_pages_beside_the_site_leads_nowhere(name: str) -> None:
    file = HOUSE / name
    lost = []
    for path, anchor in pages.TARGET.findall(file.read_text(encoding="utf-8")):
        target = file.parent / path if path else file
        known = anchors(target.read_text(encoding="utf-8")) if anchor else set()
        if not target.exists() or (anchor and anchor[1:] not in known):
            lost.append(path + anchor)
    assert not lost, lost


def test_the_search_finds_settings_and_words_of_pages(site: dict[Path, Read]) -> None:
    (html,) = {file.parent for file in site if file.name == "search.html"}
    found = json.loads((html / "searchindex.js").read_text(encoding="utf-8")[len("Search.setIndex(") : -1])
    number = found["docnames"].index("reference/settings")
    assert {"exchange_period", "kl_coef"} <= {entry[-1] for entries in found["objects"].values() for entry in entries}
    held = found["terms"]["tensorboard"]
    assert found["docnames"].index("reference/metrics") in (held if isinstance(held, list) else [held])
    assert "Settings" in found["titles"][number]


def test_every_command_among_the_recipes_is_one_that_would_be_taken() -> None:
    commands = COMMAND.findall((DOCS / "recipes.md").read_text(encoding="utf-8"))
    assert len(commands) > 40
    arms = {name: load(name).arms.keys() for name in studies()}
    for program, name, *words in map(shlex.split, commands):
        if program == "cory" and "…" not in words:
            options = parsed(name, words)
            if name == "study":
                study, *names = [word for word in options.words or () if "=" not in word]
                assert set(names) <= arms[study], words
            elif name in ("train", "tune"):
                split_words(options.words or ()).settings()
        elif program == "python":
            module = words[0]
            assert (HOUSE / f"{module.replace('.', '/')}.py").exists() or (HOUSE / module / "__main__.py").exists()


def test_the_workflow_that_publishes_it_is_one() -> None:
    check = Path(sys.executable).parent / "check-jsonschema"
    workflow = HOUSE / ".github/workflows/site.yml"
    command = [str(check), "--builtin-schema", "vendor.github-workflows", str(workflow)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
