"""What the site adds to Sphinx.

- A line that is only a link to a Markdown file outside of `docs/`, such as `[…](../../CHANGELOG.md)`, becomes the text
  of that file below its title. On GitHub it stays a link.
- A line `<!-- generated: settings -->` becomes what the function of that name in `reference` returns.
- A link to such a file leads to the page that holds it. A link to any other file of the repository leads to a page that
  shows that file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from posixpath import join, normpath, relpath
from typing import Any

import reference
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
INSERTED = re.compile(r"^\[[^\]]*\]\(((?:\.\./)+[\w./-]+\.md)\)$")
GENERATED = re.compile(r"^<!-- generated: (\w+) -->$")
TARGET = re.compile(r"(?<=\]\()(?![a-z]+:)([^)\s#]*)(#[^)\s]+)?(?=\))")
"""Where a Markdown link leads, unless that is a URI: a path and an anchor, either of which may be missing."""
ON_THE_SITE = (".md", ".ipynb", ".png", ".svg")


def inserted() -> dict[str, str]:
    """Returns the page that holds each file outside of `docs/`, by its path in the repository."""
    holders = {}
    for page in sorted(DOCS.glob("**/*.md")):
        for line in page.read_text(encoding="utf-8").splitlines():
            if match := INSERTED.match(line):
                file = (page.parent / match[1]).resolve().relative_to(ROOT).as_posix()
                holders[file] = page.relative_to(DOCS).with_suffix("").as_posix()
    return holders


class Page:
    """One page's Markdown, made ready for Sphinx."""

    def __init__(self, docname: str, holders: dict[str, str]) -> None:
        """Takes the page's name, and what `inserted` returned."""
        self.docname = docname
        self.holders = holders
        self.shown: set[str] = set()
        """Files and folders of the repository that it links to, which get a page each."""

    def made(self, text: str) -> str:
        """Returns its text with what is inserted and generated, all links of which hold on the site."""
        return "\n".join(self._line(line) for line in text.splitlines()) + "\n"

    def _line(self, line: str) -> str:
        if line.endswith("*") and self.docname == "index" and not [*DOCS.glob(f"{line}.md")]:
            return ""  # a pattern in a table of contents, for a page that only other versions have
        if match := GENERATED.match(line):
            return str(getattr(reference, match[1])())
        if match := INSERTED.match(line):
            file = normpath(join("docs", self.docname, "..", match[1]))
            _, _, text = (ROOT / file).read_text(encoding="utf-8").partition("\n")  # below its title
            return self._links(text, file)
        return self._links(line, f"docs/{self.docname}.md")

    def _links(self, text: str, file: str) -> str:
        return TARGET.sub(lambda match: self._target(match[1], match[2] or "", file), text)

    def _target(self, path: str, anchor: str, file: str) -> str:
        """Returns where a link leads that stands in a file of the repository."""
        target = normpath(join(file, "..", path)) if path else file
        if target in self.holders:
            return self._to(f"{self.holders[target]}.md") + anchor
        if not path or (target.startswith("docs/") and target.endswith(ON_THE_SITE)):
            return self._to(target.removeprefix("docs/")) + anchor
        if not (ROOT / target).exists():
            logger.warning("%s links to %s, which is not there", file, target, location=self.docname)
        self.shown.add(target)
        return f"source:{self._to(f'source/{target}.html')}"

    def _to(self, place: str) -> str:
        return relpath(place, normpath(join(self.docname, "..")))


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Makes a page of Markdown ready, and remembers which files it links to."""
    if app.env.doc2path(docname).suffix == ".md":
        page = Page(docname, inserted())
        source[0] = page.made(source[0])
        app.env.shown_files[docname] = page.shown  # type: ignore[attr-defined]


def begin(app: Sphinx) -> None:
    """Makes room in the environment, which Sphinx keeps from build to build."""
    if not hasattr(app.env, "shown_files"):
        app.env.shown_files = {}  # type: ignore[attr-defined]


def outdated(app: Sphinx, env: Any, added: set[str], changed: set[str], removed: set[str]) -> list[str]:
    """Reads all pages of Markdown anew in every build: what they are made of may have changed."""
    return [docname for docname in env.found_docs if env.doc2path(docname).suffix == ".md"]


def files(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yields a page for each file, or folder, that a page links to."""
    shown: set[str] = set().union(*app.env.shown_files.values())  # type: ignore[attr-defined]
    for folder in [path for path in shown if (ROOT / path).is_dir()]:
        shown |= {f"{folder}/{file.name}" for file in (ROOT / folder).iterdir() if file.is_file()}
    for path in sorted(shown):
        yield f"source/{path}", {"title": path, "body": _body(app, path)}, "page.html"


def _body(app: Sphinx, path: str) -> str:
    title = f"<h1><code>{escape(path)}</code></h1>"
    file = ROOT / path
    if file.is_dir():
        names = sorted(entry.name for entry in file.iterdir() if entry.is_file())
        links = (f'<li><a href="{escape(f"{file.name}/{name}.html")}">{escape(name)}</a></li>' for name in names)
        return f"{title}<ul>{''.join(links)}</ul>"
    try:
        language = get_lexer_for_filename(file.name).aliases[0]
    except ClassNotFound:
        language = "text"
    text = file.read_text(encoding="utf-8")
    code: str = app.builder.highlighter.highlight_block(text, language)  # type: ignore[attr-defined]
    return title + code


def docstring(app: Sphinx, what: str, name: str, of: Any, options: Any, lines: list[str]) -> None:
    """Makes reStructuredText of a docstring's Markdown: code in single quotes, and indented code below a sentence."""
    code = r"(?<!`)`([^`]+)`(?!`)(?=(\w?))"
    text = re.sub(code, lambda match: f"``{match[1]}``" + "\\ " * bool(match[2]), "\n".join(lines))
    lines[:] = re.sub(r"(?m)^(\S.*[^:\n])\n\n(?= {4}\S)", r"\1\n\n::\n\n", text).split("\n")


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers it all with Sphinx."""
    app.add_lexer("csv", TextLexer)
    app.connect("builder-inited", begin)
    app.connect("env-get-outdated", outdated)
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", docstring, priority=400)  # before napoleon, which heeds code in two quotes
    app.connect("html-collect-pages", files)
    return {"version": "1", "parallel_read_safe": False}
