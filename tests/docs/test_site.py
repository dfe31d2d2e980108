"""The site builds without warnings, documents every setting, command and preset, and has no broken links."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pages
import pytest
import reference

from launch.console.cli import COMMANDS, command
from policies.settings.files import presets
from policies.settings.settings import Settings

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")),
    *sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts),
]


class PageLinks(HTMLParser):
    """The anchors of an HTML page, and its links."""

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
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, PageLinks]:
    """Builds the site, and returns the links of each page by its file."""
    folder = tmp_path_factory.mktemp("site")
    options = ["-q", "-W", "--keep-going", "-d", folder / "doctrees", DOCS, folder / "html"]
    command = [sys.executable, "-m", "sphinx", *map(str, options)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")
    return {file: PageLinks(file) for file in (folder / "html").rglob("*.html")}


@pytest.mark.parametrize("file", reference.pages(), ids=lambda file: file.stem)
def test_generated_parts_are_those_of_the_code(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert reference.generated(text) == text, "Run `make docs`."


def test_the_guide_stays_short() -> None:
    folders = {"lab", "_ext", "_build", "study"}
    guide = [file for file in DOCS.rglob("*.md") if not folders & {*file.relative_to(DOCS).parts}]
    words = sum(len(reference.PART.sub("", file.read_text(encoding="utf-8")).split()) for file in guide)
    assert len(guide) <= 22 and words <= 20_000, (len(guide), words)
    assert len((ROOT / "README.md").read_bytes()) <= 8192


def test_every_setting_command_option_and_preset_has_an_entry() -> None:
    text = reference.settings() + reference.presets()
    assert all(f'<a id="{name}"></a>' in text for name in [*Settings.model_fields, *presets()])
    sections = reference.commands()
    for name in COMMANDS:
        _, _, section = sections.partition(f"## cory {name}\n")
        section = section.partition("\n## ")[0]
        options = {option for parameter in command(name).params for option in parameter.opts if option.startswith("-")}
        assert all(option in section for option in options), name


def test_types_and_limits_of_settings_are_written_in_words() -> None:
    kinds = {name: reference.kind(field) for name, field in Settings.model_fields.items()}
    assert kinds["kl_coef"] == "number ≥ 0"
    assert kinds["lr"] == "number > 0 or null"
    assert kinds["micro_batch_tokens"] == "`auto`, integer ≥ 1 or null"
    assert kinds["gpus_per_runner"] == "number ≥ 0 or null"
    assert kinds["max_lag"] == "integer ≥ 0, ≤ 1"
    assert kinds["exchange_period"] == "integer ≥ 1 or null"
    assert kinds["weight_transfer"] == "`gloo`, `nccl`, `ipc` or null"
    assert kinds["model"] == "string or list of strings"


@pytest.mark.slow  # the site takes a minute; the workflow that publishes it builds it, too
def test_no_page_has_a_broken_link(site: dict[Path, PageLinks]) -> None:
    broken = []
    for file, page_links in site.items():
        for link in page_links.links:
            path, anchor = urlsplit(link).path, unquote(urlsplit(link).fragment)
            target = (file.parent / unquote(path)).resolve() if path else file
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (anchor and target in site and anchor not in site[target].anchors):
                broken.append(f"{file.name} -> {link}")
    assert not broken, broken


def anchors(text: str) -> set[str]:
    """The anchors of a Markdown page's headings, as on GitHub."""
    prose = re.sub(r"(?ms)^```.*?^```", "", text)
    headings = re.findall(r"(?m)^#+ (.+)$", prose)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_no_markdown_page_has_a_broken_link(file: Path) -> None:
    broken = []
    for path, anchor in pages.TARGET.findall(file.read_text(encoding="utf-8")):
        target = file.parent / path if path else file
        written = target.suffix == ".md" and target.exists()
        headings = anchors(target.read_text(encoding="utf-8")) if anchor and written else {anchor[1:]}
        if not target.exists() or (anchor and anchor[1:] not in headings):
            broken.append(path + anchor)
    assert not broken, broken


@pytest.mark.slow  # the site takes a minute; the workflow that publishes it builds it, too
def test_the_search_index_has_settings_and_words_of_pages(site: dict[Path, PageLinks]) -> None:
    (html,) = {file.parent for file in site if file.name == "search.html"}
    index = json.loads((html / "searchindex.js").read_text(encoding="utf-8")[len("Search.setIndex(") : -1])
    page_number = index["docnames"].index("reference/settings")
    assert "Settings" in index["titles"][page_number]
    page_numbers = index["terms"]["tensorboard"]
    page_numbers = page_numbers if isinstance(page_numbers, list) else [page_numbers]
    assert index["docnames"].index("reference/metrics") in page_numbers


def test_the_workflow_that_publishes_the_site_is_valid() -> None:
    check = Path(sys.executable).parent / "check-jsonschema"
    workflow = ROOT / ".github/workflows/site.yml"
    command = [str(check), "--builtin-schema", "vendor.github-workflows", str(workflow)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout
